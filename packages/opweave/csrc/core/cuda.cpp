#include "cuda.h"

#include <dlfcn.h>

#include <stdexcept>

#include "torch_shim.h"

namespace opweave {
namespace {

struct CudaShim {
  TorchError (*create_guard)(int32_t device_index, void** result);
  TorchError (*delete_guard)(void* guard);
  TorchError (*get_stream)(int32_t device_index, void** result);
};

template <class Function>
void bind(void* library, const char* symbol, Function* target) {
  *target = reinterpret_cast<Function>(dlsym(library, symbol));
  if (*target == nullptr) {
    throw std::runtime_error(std::string("this torch has no ") + symbol + ", which CUDA ops need");
  }
}

// Bound on the first call with a CUDA tensor, when torch has already loaded its CUDA library.
const CudaShim& cuda_shim() {
  static const CudaShim shim = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) throw std::runtime_error("this torch was built without CUDA");
    CudaShim bound = {};
    bind(library, "aoti_torch_create_cuda_guard", &bound.create_guard);
    bind(library, "aoti_torch_delete_cuda_guard", &bound.delete_guard);
    bind(library, "aoti_torch_get_current_cuda_stream", &bound.get_stream);
    return bound;
  }();
  return shim;
}

}  // namespace

void CurrentDevice::enter(int index) {
  if (cuda_shim().create_guard(index, &guard_) != 0) {
    throw std::runtime_error("cannot make cuda:" + std::to_string(index) + " current");
  }
}

void CurrentDevice::leave() { cuda_shim().delete_guard(guard_); }

void* current_stream(const View& view) {
  if (view.device != Device::kCuda) {
    throw std::runtime_error(std::string(view.name) + " is not on a CUDA device");
  }
  void* stream = nullptr;
  if (cuda_shim().get_stream(view.device_index, &stream) != 0) {
    throw std::runtime_error("cannot get the current stream of cuda:" +
                             std::to_string(view.device_index));
  }
  return stream;
}

}  // namespace opweave
