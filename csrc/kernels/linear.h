// The plain C interface of linear maps; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// The most tokens of one OpweaveLinear call.
#define OPWEAVE_LINEAR_TOKENS 32
// The rows of x, from one kept for the kernel to the next, are a multiple of this many bytes apart.
#define OPWEAVE_LINEAR_ALIGNMENT 64
// The same for tiles: the most tokens, the tokens of a tile, and the columns of a block.
#define OPWEAVE_LINEAR_TILES_TOKENS 256
#define OPWEAVE_LINEAR_TILE_TOKENS 16
#define OPWEAVE_LINEAR_BLOCK_COLUMNS 512

// The numbers of bfloat16 that tiles keep a number of this type as: they add up to it.
static inline int opweave_linear_parts(enum OpweaveDtype dtype) {
  return dtype == OPWEAVE_FLOAT32 ? 3 : dtype == OPWEAVE_FLOAT16 ? 2 : 1;
}

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
  int64_t tokens;      // at most OPWEAVE_LINEAR_TOKENS
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

struct OpweaveLinearKernels {
  OpweaveRangeKernel keep;    // call: OpweaveLinearTokens*
  OpweaveRangeKernel linear;  // call: OpweaveLinear*
  OpweaveRangeKernel widen;   // call: OpweaveWidenRows*
  // keep and linear by tiles, for weights of 8 bits and at least one column; null without tiles.
  OpweaveRangeKernel keep_tiles;
  OpweaveRangeKernel linear_tiles;
};

#ifdef __cplusplus
}
#endif
