#include "torch_shim.h"

#include <dlfcn.h>

namespace opweave {
namespace {

TorchShim shim = {};

struct DtypeCode {
  const char* getter;
  OpweaveDtype dtype;
  int32_t code;
};

DtypeCode dtype_codes[] = {
    {"aoti_torch_dtype_float32", OPWEAVE_FLOAT32, -1},
    {"aoti_torch_dtype_bfloat16", OPWEAVE_BFLOAT16, -1},
    {"aoti_torch_dtype_float16", OPWEAVE_FLOAT16, -1},
    {"aoti_torch_dtype_float64", OPWEAVE_FLOAT64, -1},
    {"aoti_torch_dtype_int8", OPWEAVE_INT8, -1},
    {"aoti_torch_dtype_int16", OPWEAVE_INT16, -1},
    {"aoti_torch_dtype_int32", OPWEAVE_INT32, -1},
    {"aoti_torch_dtype_int64", OPWEAVE_INT64, -1},
    {"aoti_torch_dtype_uint8", OPWEAVE_UINT8, -1},
    {"aoti_torch_dtype_bool", OPWEAVE_BOOL, -1},
    {"aoti_torch_dtype_float8_e4m3fn", OPWEAVE_FLOAT8_E4M3FN, -1},
};

// Looks up symbols, and records the first missing one.
class Binder {
 public:
  explicit Binder(void* library) : library_(library) {}

  template <class Function>
  void require(const char* symbol, Function* target) {
    find(symbol, target);
    if (*target == nullptr && missing_.empty()) missing_ = symbol;
  }

  template <class Function>
  void find(const char* symbol, Function* target) {
    *target = reinterpret_cast<Function>(dlsym(library_, symbol));
  }

  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

void bind_functions(Binder& binder, TorchShim* bound) {
  binder.require("aoti_torch_library_init_fragment", &bound->library_init_fragment);
  binder.require("aoti_torch_library_init_impl", &bound->library_init_impl);
  binder.require("aoti_torch_library_def", &bound->library_def);
  binder.require("torch_library_impl", &bound->library_impl);
  binder.require("aoti_torch_delete_tensor_object", &bound->delete_tensor);
  binder.require("torch_get_const_data_ptr", &bound->get_data);
  binder.require("torch_get_mutable_data_ptr", &bound->get_mutable_data);
  binder.require("aoti_torch_get_dim", &bound->get_dim);
  binder.require("aoti_torch_get_sizes", &bound->get_sizes);
  binder.require("aoti_torch_get_strides", &bound->get_strides);
  binder.require("aoti_torch_get_dtype", &bound->get_dtype);
  binder.require("aoti_torch_get_device_type", &bound->get_device_type);
  binder.require("aoti_torch_get_device_index", &bound->get_device_index);
  binder.require("torch_list_size", &bound->list_size);
  binder.require("torch_list_get_item", &bound->list_get);
  binder.require("torch_delete_list", &bound->delete_list);
  binder.require("aoti_torch_check", &bound->check);
  binder.require("torch_parallel_for", &bound->parallel_for);
  binder.find("torch_get_num_threads", &bound->get_num_threads);
  binder.find("aoti_torch_is_defined", &bound->is_defined);
  binder.find("torch_exception_get_what_without_backtrace", &bound->last_error);
  binder.find("torch_delete_stable_ivalue", &bound->delete_stack_value);
}

int32_t code_of(Binder& binder, const char* getter_name) {
  int32_t (*getter)() = nullptr;
  binder.require(getter_name, &getter);
  return getter != nullptr ? getter() : -1;
}

void bind_codes(Binder& binder, TorchShim* bound) {
  bound->cpu = code_of(binder, "aoti_torch_device_type_cpu");
  bound->cuda = code_of(binder, "aoti_torch_device_type_cuda");
  for (DtypeCode& entry : dtype_codes) entry.code = code_of(binder, entry.getter);
}

}  // namespace

const TorchShim& torch_shim() { return shim; }

std::string bind_torch_shim() {
  void* library = dlopen(kTorchLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return std::string(kTorchLibrary) + " is not loaded; import torch first";
  Binder binder(library);
  TorchShim bound = {};
  bind_functions(binder, &bound);
  bind_codes(binder, &bound);
  if (!binder.missing().empty()) {
    return "this torch has no " + binder.missing() + "; torch 2.11 or newer is needed";
  }
  shim = bound;
  return "";
}

OpweaveDtype dtype_of_torch(int32_t torch_dtype) {
  for (const DtypeCode& entry : dtype_codes) {
    if (entry.code == torch_dtype) return entry.dtype;
  }
  return OPWEAVE_OTHER_DTYPE;
}

}  // namespace opweave
