// Argument checks of every kernel of torch.ops.acme.

#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "../memory.h"
#include "ops.h"

// Runs the code with scalar_t: float, bfloat16 or half. Sums are in float, so there is no double.
#define ACME_FLOATS(type, name, ...)                                             \
  AT_DISPATCH_SWITCH(type, name, AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)       \
                     AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)                \
                     AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

namespace acme {

// The bytes from a tensor's first element to the end of its last.
inline std::size_t extent(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t elements = 1;
  for (int64_t d = 0; d < t.dim(); ++d) elements += (t.size(d) - 1) * t.stride(d);
  return elements * t.element_size();
}

// Checks that `t` is on the device of `like`, dense in its last dimension, and within its memory.
inline void check(const char* name, const Tensor& t, const Tensor& like) {
  TORCH_CHECK(t.device().type() == c10::DeviceType::PrivateUse1, name, " is on ", t.device(),
              ", not on acme.");
  TORCH_CHECK(t.device() == like.device(), name, " is on ", t.device(), ", and others on ",
              like.device(), ".");
  TORCH_CHECK(t.dim() == 0 || t.size(-1) < 2 || t.stride(-1) == 1, name,
              ": its last dimension must be dense; its strides are ", t.strides(), ".");
  TORCH_CHECK(holds(t.const_data_ptr(), extent(t), t.device().index()), name,
              " reaches beyond its memory.");
}

inline void check_dtype(const char* name, const Tensor& t, c10::ScalarType wanted) {
  TORCH_CHECK(t.scalar_type() == wanted, name, " is ", t.scalar_type(), "; it must be ", wanted,
              ".");
}

inline void check_shape(const char* name, const Tensor& t, c10::IntArrayRef wanted) {
  TORCH_CHECK(t.sizes() == wanted, name, " has shape ", t.sizes(), "; it must be ", wanted, ".");
}

}  // namespace acme
