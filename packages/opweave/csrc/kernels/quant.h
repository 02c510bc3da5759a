// The plain C interface of quantization to 8 bits; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = cast(clamp(x * (1 / scale))): operand 0 of `rows` is out, operand 1 is x. Every block of
// block_rows x block_columns elements has one scale; a row of blocks has `row_blocks` of them.
struct OpweaveStaticQuant {
  void* out;
  const void* x;
  const float* scales;
  struct OpweaveRows rows;
  int64_t width;
  int64_t block_rows;
  int64_t block_columns;
  int64_t row_blocks;
  enum OpweaveDtype dtype;
  enum OpweaveDtype out_dtype;  // OPWEAVE_FLOAT8_E4M3FN or OPWEAVE_INT8
};

// Quantization with one scale per row, which is computed and written to scales[row].
struct OpweavePerTokenQuant {
  void* out;
  const void* x;
  float* scales;
  struct OpweaveRows rows;
  int64_t width;
  float upper_bound;  // upper bound for the largest magnitude, or infinity
  enum OpweaveDtype dtype;
  enum OpweaveDtype out_dtype;
};

// Quantization to float8_e4m3fn with one scale per group of `group_size` adjacent elements.
// Computes x / scale, not x * (1 / scale).
struct OpweaveGroupQuant {
  void* out;
  const void* x;
  float* scales;
  struct OpweaveRows rows;
  int64_t width;
  int64_t group_size;
  int32_t power_of_two;  // round scales up to powers of two
  enum OpweaveDtype dtype;
};

// largest[row] = the largest magnitude in a row of x, or NaN if there is one. Operands 0 and 1 are
// x.
struct OpweaveLargest {
  float* largest;
  const void* x;
  struct OpweaveRows rows;
  int64_t width;
  enum OpweaveDtype dtype;
};

struct OpweaveQuantKernels {
  OpweaveRangeKernel static_quant;     // call: OpweaveStaticQuant*
  OpweaveRangeKernel per_token_quant;  // call: OpweavePerTokenQuant*
  OpweaveRangeKernel group_quant;      // call: OpweaveGroupQuant*
  OpweaveRangeKernel largest;          // call: OpweaveLargest*
};

#ifdef __cplusplus
}
#endif
