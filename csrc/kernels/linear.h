// The plain C interface of linear maps of few tokens; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// The most tokens of one OpweaveLinear call.
#define OPWEAVE_LINEAR_TOKENS 32
// Rows of widened x are this many floats apart, or a multiple.
#define OPWEAVE_LINEAR_ALIGNMENT 16

// out[r - begin] = row r of x in float32, zeros up to `stride`: operand 1 of `rows` is x.
struct OpweaveWiden {
  float* out;
  const void* x;
  struct OpweaveRows rows;
  int64_t width;
  int64_t stride;
  enum OpweaveDtype dtype;
};

// out[t, n] = sum(x[t] * weight[n]) * scale[n] + bias[n]. A row of the call is an output feature n,
// for all tokens. out is contiguous; weight_stride is in elements.
struct OpweaveLinear {
  void* out;
  const float* x;  // widened
  const void* weight;
  const float* scale;  // or null for one
  const void* bias;    // or null for zero
  int64_t tokens;      // at most OPWEAVE_LINEAR_TOKENS
  int64_t width;
  int64_t out_features;
  int64_t x_stride;
  int64_t weight_stride;
  int64_t scale_stride;  // 1, or 0 for one scale for all
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;
  enum OpweaveDtype bias_dtype;
};

struct OpweaveLinearKernels {
  OpweaveRangeKernel widen;   // call: OpweaveWiden*
  OpweaveRangeKernel linear;  // call: OpweaveLinear*
};

#ifdef __cplusplus
}
#endif
