// Device tensors as the host sees them.

#pragma once

#include <ATen/core/Tensor.h>

namespace acme {

// A CPU tensor over the memory of `tensor`, which must outlive it. It takes the place of a DMA
// engine and of the simplest device code; a device with memory of its own has none.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace acme
