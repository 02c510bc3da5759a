// The plain C interface of linear layers; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// The maximum number of tokens of an OpweaveLinear call.
#define OPWEAVE_LINEAR_TOKENS 32
// The strides of packed rows of x are multiples of this number of bytes.
#define OPWEAVE_LINEAR_ALIGNMENT 64
// The maximum number of tokens of a call of OpweaveLinearMany.
#define OPWEAVE_LINEAR_MANY_TOKENS 256

// Pack row r of x into out + (r - begin) * stride, in the format for products with weights of
// weight_dtype: at most four bytes per element, padded with zeros to a whole step. Operand 1 of
// `rows` is x.
struct OpweaveLinearTokens {
  void* out;
  const void* x;
  struct OpweaveRows rows;
  int64_t width;
  int64_t stride;  // in bytes
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;  // that of x, or 8-bit
};

// out[t, n] = sum(x[t] * weight[n]) * scale[n] + bias[n]. A row of the call is an output feature n,
// for all tokens. out is contiguous; weight_stride is in elements.
struct OpweaveLinear {
  void* out;
  const void* x;       // packed
  const void* weight;
  const float* scale;  // null: 1
  const void* bias;    // null: 0
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

// The kernels for many tokens of at least one column; null if the instruction set lacks them. Tokens
// are packed in blocks of columns, x_stride bytes apart; a block contains one group after another.
struct OpweaveLinearMany {
  OpweaveRangeKernel keep;    // call: OpweaveLinearTokens*; begins at a whole group
  OpweaveRangeKernel linear;  // call: OpweaveLinear*
  int64_t group;              // tokens per group; buffers have room for whole groups
  int64_t columns;            // per block
  int64_t (*group_bytes)(enum OpweaveDtype dtype);  // size of a group in a block
};

struct OpweaveLinearKernels {
  OpweaveRangeKernel keep;    // call: OpweaveLinearTokens*
  OpweaveRangeKernel linear;  // call: OpweaveLinear*
  OpweaveRangeKernel widen;   // call: OpweaveWidenRows*
  struct OpweaveLinearMany many;     // for weights of the dtype of x
  struct OpweaveLinearMany many_w8;  // for 8-bit weights
};

#ifdef __cplusplus
}
#endif
