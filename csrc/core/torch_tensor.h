// Reads a torch tensor through torch's stable C interface.
#pragma once

#include "torch_shim.h"
#include "view.h"

namespace opweave {

// Fill everything of `view` but its name. Returns false for a tensor that is neither in CPU nor in
// CUDA memory. Throws std::runtime_error if torch refuses, as it does where there is no memory.
bool read_torch_tensor(TorchTensor tensor, bool is_written, View* view);

}  // namespace opweave
