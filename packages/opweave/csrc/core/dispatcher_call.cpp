#include "dispatcher_call.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "registry.h"
#include "slots.h"
#include "torch_shim.h"
#include "torch_tensor.h"
#include "utf8.h"

namespace opweave {
namespace {

// The torch ABI version of the boxed kernels: 2.11.0.
constexpr uint64_t kBuiltFor = (uint64_t{2} << 56) | (uint64_t{11} << 48);

void require(TorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("torch could not ") + what);
}

// Owns one argument on the stack of a boxed kernel, which must release its arguments.
class OwnedArgument {
 public:
  OwnedArgument() = default;
  OwnedArgument(const OwnedArgument&) = delete;
  OwnedArgument& operator=(const OwnedArgument&) = delete;
  ~OwnedArgument() {
    if (!present_) return;
    if (kind_ == Kind::kTensor) torch_shim().delete_tensor(tensor());
    if (kind_ == Kind::kIntegerList) torch_shim().delete_list(list());
  }

  void take(StackValue slot, const Type& type) noexcept {
    kind_ = type.kind;
    present_ = true;
    slot_ = slot;
    if (!type.optional) return;
    // A present optional is stored in a heap cell, which must be freed too.
    auto* cell = reinterpret_cast<StackValue*>(slot);
    present_ = cell != nullptr;
    if (!present_) return;
    slot_ = *cell;
    free_cell(cell);
  }

  bool present() const { return present_; }
  StackValue slot() const { return slot_; }
  TorchTensor tensor() const { return reinterpret_cast<TorchTensor>(slot_); }
  TorchList list() const { return reinterpret_cast<TorchList>(slot_); }

 private:
  static void free_cell(StackValue* cell) {
    const auto release = torch_shim().delete_stack_value;
    if (release != nullptr) {
      release(cell);
    } else {
      delete cell;
    }
  }

  bool present_ = false;
  Kind kind_;
  StackValue slot_;
};

bool is_none(TorchTensor tensor) {
  bool is_defined = true;
  const auto ask = torch_shim().is_defined;
  return ask != nullptr && ask(tensor, &is_defined) == 0 && !is_defined;
}

View view_of(TorchTensor tensor, const Argument& argument) {
  View view;
  view.name = argument.name.c_str();
  bool is_read = false;
  try {
    is_read = read_torch_tensor(tensor, argument.written, &view);
  } catch (const std::exception&) {
    if (!is_none(tensor)) throw;
    throw std::runtime_error(argument.name + " must be a tensor, found None");
  }
  if (!is_read) throw std::runtime_error(argument.name + " must be on the CPU or a CUDA device");
  if (view.lacks_memory()) {
    throw std::runtime_error(argument.name + " has no memory: its storage was freed");
  }
  return view;
}

IntList list_of(TorchList list, IntStorage* storage) {
  const TorchShim& torch = torch_shim();
  size_t size = 0;
  require(torch.list_size(list, &size), "read a list's length");
  int64_t* integers = storage->allocate(size);
  for (size_t i = 0; i < size; ++i) {
    StackValue element = 0;
    require(torch.list_get(list, i, &element), "read a list's element");
    integers[i] = static_cast<int64_t>(element);
  }
  return {integers, size};
}

void read_argument(const OwnedArgument& owned, const Argument& argument, IntStorage* storage,
                   Value* value) {
  value->present = owned.present();
  if (!value->present) return;
  const StackValue slot = owned.slot();
  switch (argument.type.kind) {
    case Kind::kTensor: value->view = view_of(owned.tensor(), argument); break;
    case Kind::kInteger: value->scalar.integer = static_cast<int64_t>(slot); break;
    case Kind::kNumber: std::memcpy(&value->scalar.number, &slot, sizeof(double)); break;
    case Kind::kFlag: std::memcpy(&value->scalar.flag, &slot, sizeof(bool)); break;
    case Kind::kIntegerList: value->list = list_of(owned.list(), storage); break;
  }
}

StackValue to_stack(const Scalar& result, Kind kind) {
  StackValue slot = 0;
  switch (kind) {
    case Kind::kNumber: std::memcpy(&slot, &result.number, sizeof(double)); break;
    case Kind::kFlag: std::memcpy(&slot, &result.flag, sizeof(bool)); break;
    default: slot = static_cast<StackValue>(result.integer); break;
  }
  return slot;
}

void call_boxed(const Op& op, StackValue* stack) {
  const std::vector<Argument>& arguments = op.schema.arguments;
  // Take ownership of all arguments before anything can throw.
  OwnedArgument owned[kMaxArguments];
  for (size_t i = 0; i < arguments.size(); ++i) owned[i].take(stack[i], arguments[i].type);
  Value values[kMaxArguments];
  IntStorage storage;
  try {
    for (size_t i = 0; i < arguments.size(); ++i) {
      read_argument(owned[i], arguments[i], &storage, &values[i]);
    }
  } catch (const std::exception& e) {
    throw std::runtime_error(op.schema.name + ": " + e.what());
  }
  Scalar results[kMaxResults];
  run(op, values, results);
  const std::vector<Kind>& returns = op.schema.returns;
  for (size_t i = 0; i < returns.size(); ++i) stack[i] = to_stack(results[i], returns[i]);
}

// Longer messages are truncated.
thread_local char message[4096];

bool succeeds(const Op& op, StackValue* stack) noexcept {
  try {
    call_boxed(op, stack);
    return true;
  } catch (const std::exception& e) {
    const std::string cut = valid_utf8(std::string(e.what()).substr(0, sizeof(message) - 1));
    std::memcpy(message, cut.c_str(), cut.size() + 1);
    return false;
  }
}

// Exceptions must not propagate into torch, because this library has its own copy of the C++
// runtime. So succeeds() catches them, and torch throws its own in check(), through a frame without
// destructors.
template <size_t I>
struct BoxedSlot {
  static void call(StackValue* stack, uint64_t, uint64_t) {
    if (!succeeds(op_table[I], stack)) {
      torch_shim().check(false, op_table[I].schema.name.c_str(), __FILE__, __LINE__, message);
    }
  }
};

constexpr auto kBoxedSlots = make_slots<BoxedSlot>();

// Return the message of torch's last error, if this torch provides it.
std::string because() {
  const auto last_error = torch_shim().last_error;
  const char* text = last_error == nullptr ? nullptr : last_error();
  return text == nullptr ? "" : std::string(": ") + text;
}

void require_registered(TorchError error, const std::string& what) {
  if (error != 0) throw std::runtime_error("torch could not " + what + because());
}

// The libraries are never released, because this would remove the registrations.
TorchLibrary open_library(const char* torch_namespace, const char* key) {
  const TorchShim& torch = torch_shim();
  TorchLibrary library = nullptr;
  const TorchError error =
      key == nullptr
          ? torch.library_init_fragment(torch_namespace, __FILE__, __LINE__, &library)
          : torch.library_init_impl(torch_namespace, key, __FILE__, __LINE__, &library);
  require_registered(error, std::string("open the namespace ") + torch_namespace);
  return library;
}

void define_all(const char* torch_namespace) {
  const TorchLibrary library = open_library(torch_namespace, nullptr);
  for (const Op& op : all_ops()) {
    require_registered(torch_shim().library_def(library, op.schema.text.c_str()),
                       "define " + op.schema.text);
  }
}

void register_for(Device device, const char* torch_namespace) {
  TorchLibrary library = nullptr;
  const std::vector<Op>& ops = all_ops();
  for (size_t i = 0; i < ops.size(); ++i) {
    if (!ops[i].runs_on(device)) continue;
    if (library == nullptr) library = open_library(torch_namespace, device_name(device));
    require_registered(torch_shim().library_impl(library, ops[i].schema.name.c_str(),
                                                 kBoxedSlots[i], kBuiltFor),
                       "register " + ops[i].schema.name);
  }
}

std::string open_once(const char* torch_namespace) {
  std::string reason = bind_torch_shim();
  if (!reason.empty()) return reason;
  try {
    define_all(torch_namespace);
    register_for(Device::kCpu, torch_namespace);
    register_for(Device::kCuda, torch_namespace);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace

std::string open_dispatcher_call(const char* torch_namespace) {
  static const std::string problem = open_once(torch_namespace);
  return problem;
}

}  // namespace opweave
