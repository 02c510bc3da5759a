// The plain C interface of linear layers; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// The most tokens of one OpweaveLinear call.
#define OPWEAVE_LINEAR_TOKENS 32
// The rows of x, from one kept for the kernel to the next, are a multiple of this many bytes apart.
#define OPWEAVE_LINEAR_ALIGNMENT 64
// The same for many tokens.
#define OPWEAVE_LINEAR_MANY_TOKENS 256

// out + (r - begin) * stride = row r of x as it is multiplied by weights of weight_dtype, at most
// four bytes for each element, zeros up to a whole step of the products: operand 1 of `rows` is x.
struct OpweaveLinearTokens {
  void* out;
  const void* x;
  struct OpweaveRows rows;
  int64_t width;
  int64_t stride;  // in bytes
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;  // that of x, or of 8 bits
};

// out[t, n] = sum(x[t] * weight[n]) * scale[n] + bias[n]. A row of the call is an output feature n,
// for all tokens. out is contiguous; weight_stride is in elements.
struct OpweaveLinear {
  void* out;
  const void* x;       // kept
  const void* weight;
  const float* scale;  // or null for one
  const void* bias;    // or null for zero
  int64_t tokens;      // at most OPWEAVE_LINEAR_TOKENS, or OPWEAVE_LINEAR_MANY_TOKENS
  int64_t width;
  int64_t out_features;
  int64_t x_stride;  // in bytes
  int64_t weight_stride;
  int64_t scale_stride;  // 1, or 0 for one scale for all
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;
  enum OpweaveDtype bias_dtype;
};

// out[r] = weight[r] * scale[r], in float32; out is contiguous, weight_stride is in elements.
struct OpweaveWidenRows {
  float* out;
  const void* weight;
  const float* scale;
  int64_t width;
  int64_t weight_stride;
  int64_t scale_stride;  // 1, or 0 for one scale for all
  enum OpweaveDtype weight_dtype;  // of 8 bits
};

// The same for many tokens of at least one column; null where there is nothing for them. Tokens are
// kept in blocks of columns, x_stride bytes apart, and in a block one group after the other.
struct OpweaveLinearMany {
  OpweaveRangeKernel keep;    // call: OpweaveLinearTokens*; begins at a whole group
  OpweaveRangeKernel linear;  // call: OpweaveLinear*
  int64_t group;              // of tokens: there is room for whole ones
  int64_t columns;            // of a block
  int64_t (*group_bytes)(enum OpweaveDtype dtype);  // of a group in a block
};

struct OpweaveLinearKernels {
  OpweaveRangeKernel keep;    // call: OpweaveLinearTokens*
  OpweaveRangeKernel linear;  // call: OpweaveLinear*
  OpweaveRangeKernel widen;   // call: OpweaveWidenRows*
  struct OpweaveLinearMany many;     // for weights that have the type of x
  struct OpweaveLinearMany many_w8;  // for weights of 8 bits
};

#ifdef __cplusplus
}
#endif
