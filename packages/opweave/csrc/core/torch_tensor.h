// Read torch tensors through torch's stable C ABI.
#pragma once

#include "torch_shim.h"
#include "view.h"

namespace opweave {

// Fill `view` except its name. Returns false for a tensor that is neither in CPU nor in CUDA
// memory. Throws std::runtime_error if torch fails, for example for a tensor without memory.
bool read_torch_tensor(TorchTensor tensor, bool is_written, View* view);

}  // namespace opweave
