// The plain C interface of the activations; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// Operand 0 of `rows` is out, operand 1 is x. A row of out has `width` elements; a row of x has
// `width` elements, or twice as many if the op multiplies halves or pairs. out may be x if they
// have the same width.
struct OpweaveActivation {
  void* out;
  const void* x;
  const void* alpha_p;  // xielu's learned parameters, in the dtype of x
  const void* alpha_n;
  struct OpweaveRows rows;
  int64_t width;
  float parameters[2];  // see the comments on the kernels below
  enum OpweaveDtype dtype;
};

struct OpweaveActivationKernels {  // call: OpweaveActivation*
  OpweaveRangeKernel silu_and_mul;
  OpweaveRangeKernel mul_and_silu;
  OpweaveRangeKernel gelu_and_mul;
  OpweaveRangeKernel gelu_tanh_and_mul;
  OpweaveRangeKernel gelu_and_mul_sparse;       // std_multiplier
  OpweaveRangeKernel gelu_tanh_and_mul_sparse;  // std_multiplier
  OpweaveRangeKernel fatrelu_and_mul;           // threshold
  OpweaveRangeKernel swigluoai_and_mul;         // alpha, limit
  OpweaveRangeKernel gelu_new;
  OpweaveRangeKernel gelu_fast;
  OpweaveRangeKernel quick_gelu;
  OpweaveRangeKernel relu2;
  OpweaveRangeKernel xielu;  // beta, eps
};

#ifdef __cplusplus
}
#endif
