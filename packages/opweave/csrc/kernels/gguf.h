// The plain C interface of linear layers with the blocks of GGUF files; see kernels.h for the rules.
#pragma once

#include "kernels/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// The maximum number of tokens of an OpweaveLinearGguf call.
#define OPWEAVE_GGUF_TOKENS 32

enum OpweaveGgufFormat {
  OPWEAVE_Q8_0,
  OPWEAVE_Q4_0,
  OPWEAVE_Q4_1,
  OPWEAVE_Q4_K,
  OPWEAVE_Q5_K,
  OPWEAVE_Q6_K,
  OPWEAVE_GGUF_FORMATS,
};

// Pack row r of x into out + (r - begin) * stride as integers with scales. Operand 1 of `rows` is x.
struct OpweaveGgufTokens {
  void* out;
  const void* x;
  struct OpweaveRows rows;
  int64_t width;
  int64_t stride;  // in bytes; at least token_bytes
  enum OpweaveDtype dtype;
  enum OpweaveGgufFormat format;  // of the weights
  int32_t is_int8;  // integers of 8 bits; otherwise of 16, or of 31 for float32
};

struct OpweaveGgufWeight {
  const uint8_t* blocks;
  int64_t width;   // columns, in whole blocks
  int64_t stride;  // in bytes
  enum OpweaveGgufFormat format;
};

// out[t, n] = sum(x[t] * weight[n]) + bias[n]. A row of the call is an output feature n, for all
// tokens. out is contiguous.
struct OpweaveLinearGguf {
  void* out;
  const void* x;  // packed
  const struct OpweaveGgufTokens* kept;  // how x was packed
  struct OpweaveGgufWeight weight;
  const void* bias;     // null: 0
  int64_t first_token;  // the row of kept that is token 0
  int64_t tokens;       // at most OPWEAVE_GGUF_TOKENS
  int64_t out_features;
  enum OpweaveDtype bias_dtype;
};

// A linear layer for many tokens in bfloat16.
struct OpweaveManyGguf {
  struct OpweaveLinear linear;  // without weight and scale
  struct OpweaveGgufWeight weight;
};

// out[n] = weight[n], in out_dtype (float32 or bfloat16); out is contiguous.
struct OpweaveWidenGguf {
  void* out;
  struct OpweaveGgufWeight weight;
  enum OpweaveDtype out_dtype;
};

struct OpweaveGgufKernels {
  int64_t (*block_columns)(enum OpweaveGgufFormat format);
  int64_t (*block_bytes)(enum OpweaveGgufFormat format);
  int64_t (*token_bytes)(enum OpweaveDtype dtype, int64_t width, enum OpweaveGgufFormat format,
                         int32_t is_int8);
  OpweaveRangeKernel keep;    // call: OpweaveGgufTokens*
  OpweaveRangeKernel linear;  // call: OpweaveLinearGguf*
  OpweaveRangeKernel widen;   // call: OpweaveWidenGguf*
  struct OpweaveLinearMany many;  // call: OpweaveManyGguf*
};

#ifdef __cplusplus
}
#endif
