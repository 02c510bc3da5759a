#include "core/dispatcher_door.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "core/registry.h"
#include "core/slots.h"
#include "core/torch_shim.h"

namespace opweave {
namespace {

constexpr const char* kNamespace = "opweave_c";

// The torch whose calling convention the boxed kernels speak: 2.11.0.
constexpr uint64_t kBuiltFor = (uint64_t{2} << 56) | (uint64_t{11} << 48);

void require(TorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("torch could not ") + what);
}

// A boxed kernel owns the tensors on its stack; this releases one of them.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  ~OwnedTensor() {
    if (tensor_ != nullptr) torch_shim().delete_tensor(tensor_);
  }

  // The tensor in a stack slot; null for None.
  TorchTensor take(StackValue slot, bool optional) {
    if (!optional) {
      tensor_ = reinterpret_cast<TorchTensor>(slot);
    } else if (auto* box = reinterpret_cast<StackValue*>(slot)) {
      // An optional that is not None comes in a heap cell, which is ours to free as well.
      tensor_ = reinterpret_cast<TorchTensor>(*box);
      free_cell(box);
    }
    return tensor_;
  }

 private:
  static void free_cell(StackValue* cell) {
    const auto release = torch_shim().delete_stack_value;
    if (release != nullptr) {
      release(cell);
    } else {
      delete cell;
    }
  }

  TorchTensor tensor_ = nullptr;
};

View view_of(TorchTensor tensor, const char* name) {
  View view;
  view.name = name;
  view.present = tensor != nullptr;
  if (!view.present) return view;
  const TorchShim& torch = torch_shim();
  int32_t device = 0;
  require(torch.get_device_type(tensor, &device), "read a tensor's device");
  if (device != torch.device_type_cpu()) {
    throw std::runtime_error(std::string(name) + " must be on the CPU, as the other tensors are");
  }
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;
  const void* data = nullptr;
  require(torch.get_dim(tensor, &rank), "read a tensor's rank");
  require(torch.get_sizes(tensor, &sizes), "read a tensor's sizes");
  require(torch.get_strides(tensor, &strides), "read a tensor's strides");
  require(torch.get_dtype(tensor, &dtype), "read a tensor's dtype");
  require(torch.get_data(tensor, &data), "read a tensor's address");
  view.data = static_cast<char*>(const_cast<void*>(data));
  view.sizes = sizes;
  view.strides = strides;
  view.rank = static_cast<int>(rank);
  view.dtype = dtype_of_torch(dtype);
  return view;
}

bool is_tensor(Kind kind) { return kind == Kind::kTensor || kind == Kind::kOptionalTensor; }

void read_scalar(StackValue slot, Kind kind, Value* value) {
  switch (kind) {
    case Kind::kInteger: value->integer = static_cast<int64_t>(slot); break;
    case Kind::kNumber: std::memcpy(&value->number, &slot, sizeof(double)); break;
    default: std::memcpy(&value->flag, &slot, sizeof(bool)); break;
  }
}

void call_boxed(const Op& op, const StackValue* stack) {
  const std::vector<Argument>& arguments = op.schema.arguments;
  // Take every tensor before anything can throw, so that none leaks.
  OwnedTensor owned[kMaxArguments];
  TorchTensor tensors[kMaxArguments];
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Kind kind = arguments[i].kind;
    if (is_tensor(kind)) tensors[i] = owned[i].take(stack[i], kind == Kind::kOptionalTensor);
  }
  Value values[kMaxArguments];
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_tensor(arguments[i].kind)) {
      values[i].view = view_of(tensors[i], arguments[i].name.c_str());
    } else {
      read_scalar(stack[i], arguments[i].kind, &values[i]);
    }
  }
  run(op, values);
}

// Long enough for any message; a longer one is cut.
thread_local char message[4096];

bool succeeds(const Op& op, const StackValue* stack) noexcept {
  try {
    call_boxed(op, stack);
    return true;
  } catch (const std::exception& e) {
    std::snprintf(message, sizeof(message), "%s", e.what());
    return false;
  }
}

// An exception must not cross into torch: this library has its own copy of the C++ runtime. So
// every one ends in succeeds(), and torch throws its own from check(), through a frame with nothing
// to clean up.
template <size_t I>
struct BoxedSlot {
  static void call(StackValue* stack, uint64_t, uint64_t) {
    if (!succeeds(op_table[I], stack)) {
      torch_shim().check(false, op_table[I].schema.name.c_str(), __FILE__, __LINE__, message);
    }
  }
};

constexpr auto kBoxedSlots = make_slots<BoxedSlot>();

void register_all() {
  const TorchShim& torch = torch_shim();
  // Never released: the registrations live as long as these.
  TorchLibrary definitions = nullptr;
  TorchLibrary kernels = nullptr;
  require(torch.library_init_fragment(kNamespace, __FILE__, __LINE__, &definitions),
          "open the library opweave_c");
  require(torch.library_init_impl(kNamespace, "CPU", __FILE__, __LINE__, &kernels),
          "open the library opweave_c for CPU");
  const std::vector<Op>& ops = all_ops();
  for (size_t i = 0; i < ops.size(); ++i) {
    const Schema& schema = ops[i].schema;
    require(torch.library_def(definitions, schema.text.c_str()), "define an op");
    require(torch.library_impl(kernels, schema.name.c_str(), kBoxedSlots[i], kBuiltFor),
            "register a kernel");
  }
}

}  // namespace

std::string open_dispatcher_door() {
  static const std::string problem = [] {
    std::string reason = bind_torch_shim();
    if (!reason.empty()) return reason;
    try {
      register_all();
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string();
  }();
  return problem;
}

}  // namespace opweave
