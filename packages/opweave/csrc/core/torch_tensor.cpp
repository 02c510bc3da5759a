#include "torch_tensor.h"

#include <stdexcept>
#include <string>

namespace opweave {
namespace {

void require(TorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("torch could not read a tensor's ") + what);
}

bool read_device(const TorchShim& torch, TorchTensor tensor, View* view) {
  int32_t device = 0;
  int32_t index = 0;
  require(torch.get_device_type(tensor, &device), "device");
  if (device == torch.cpu) {
    view->device = Device::kCpu;
  } else if (device == torch.cuda) {
    view->device = Device::kCuda;
    require(torch.get_device_index(tensor, &index), "device");
  } else {
    return false;
  }
  view->device_index = index;
  return true;
}

}  // namespace

bool read_torch_tensor(TorchTensor tensor, bool is_written, View* view) {
  const TorchShim& torch = torch_shim();
  if (!read_device(torch, tensor, view)) return false;
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;
  require(torch.get_dim(tensor, &rank), "rank");
  require(torch.get_sizes(tensor, &sizes), "sizes");
  require(torch.get_strides(tensor, &strides), "strides");
  require(torch.get_dtype(tensor, &dtype), "dtype");
  if (is_written) {
    void* data = nullptr;
    require(torch.get_mutable_data(tensor, &data), "address");
    view->data = static_cast<char*>(data);
  } else {
    const void* data = nullptr;
    require(torch.get_data(tensor, &data), "address");
    view->data = static_cast<char*>(const_cast<void*>(data));
  }
  view->sizes = sizes;
  view->strides = strides;
  view->rank = static_cast<int>(rank);
  view->dtype = dtype_of_torch(dtype);
  return true;
}

}  // namespace opweave
