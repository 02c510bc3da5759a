// CUDA calls, as far as the call paths and the functions behind them need torch for them. Nothing
// here needs CUDA to build.
#pragma once

#include "view.h"

namespace opweave {

// Makes the device of a view current, in CUDA's sense, for as long as this lives; nothing on a CPU.
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

// The stream (a cudaStream_t) that torch uses on the device of a view. Throws on a CPU.
void* current_stream(const View& view);

}  // namespace opweave
