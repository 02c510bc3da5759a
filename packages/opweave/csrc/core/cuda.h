// The CUDA functions of torch that the call paths need, bound at run time. Builds without CUDA.
#pragma once

#include "view.h"

namespace opweave {

// A guard that makes the CUDA device of a view current; a no-op for the CPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(const View& view) {
    if (view.device == Device::kCuda) enter(view.device_index);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (guard_ != nullptr) leave();
  }

 private:
  void enter(int index);
  void leave();

  void* guard_ = nullptr;
};

// Return torch's current stream (a cudaStream_t) on the device of a view. Throws for the CPU.
void* current_stream(const View& view);

}  // namespace opweave
