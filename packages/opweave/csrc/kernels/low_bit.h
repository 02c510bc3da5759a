// The plain C interface of linear layers with 4-bit weights; see kernels.h for the rules.
#pragma once

#include "kernels/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// The maximum number of tokens of an OpweaveLinearW4 call.
#define OPWEAVE_LOW_BIT_TOKENS 32
// A group of columns is a multiple of this number.
#define OPWEAVE_LOW_BIT_GROUP 8

// Pack row r of x into out + (r - begin) * stride as integers with scales. Operand 1 of `rows` is x.
struct OpweaveLowBitTokens {
  void* out;
  const void* x;
  struct OpweaveRows rows;
  int64_t width;
  int64_t group;   // columns per scale of the weights
  int64_t stride;  // in bytes; at least token_bytes
  enum OpweaveDtype dtype;
  int32_t is_int8;  // integers of 8 bits; otherwise of 16, or of 31 for float32
};

// The weights: q * scale + offset. Strides are in elements.
struct OpweaveWeightW4 {
  const uint8_t* q;  // two values per byte, the even column in the low four bits
  const void* scale;
  const void* offset;  // null: -8 * scale
  int64_t width;       // columns
  int64_t group;       // columns per scale
  int64_t q_stride;
  int64_t scale_stride;
  int64_t offset_stride;
  enum OpweaveDtype scale_dtype;  // and that of offset
};

// out[t, n] = sum(x[t] * weight[n]) + bias[n]. A row of the call is an output feature n, for all
// tokens. out is contiguous.
struct OpweaveLinearW4 {
  void* out;
  const void* x;  // packed
  const struct OpweaveLowBitTokens* kept;  // how x was packed
  struct OpweaveWeightW4 weight;
  const void* bias;     // null: 0
  int64_t first_token;  // the row of kept that is token 0
  int64_t tokens;       // at most OPWEAVE_LOW_BIT_TOKENS
  int64_t out_features;
  enum OpweaveDtype bias_dtype;
};

// A linear layer for many tokens in bfloat16, whose groups are multiples of OPWEAVE_MANY_W4_GROUP
// columns.
#define OPWEAVE_MANY_W4_GROUP 32
struct OpweaveManyW4 {
  struct OpweaveLinear linear;  // without weight and scale
  struct OpweaveWeightW4 weight;
};

// out[n] = weight[n], in out_dtype (float32 or bfloat16); out is contiguous.
struct OpweaveWidenW4 {
  void* out;
  struct OpweaveWeightW4 weight;
  enum OpweaveDtype out_dtype;
};

struct OpweaveLowBitKernels {
  int64_t (*token_bytes)(enum OpweaveDtype dtype, int64_t width, int64_t group, int32_t is_int8);
  OpweaveRangeKernel keep;    // call: OpweaveLowBitTokens*
  OpweaveRangeKernel linear;  // call: OpweaveLinearW4*
  OpweaveRangeKernel widen;   // call: OpweaveWidenW4*
  struct OpweaveLinearMany many;  // call: OpweaveManyW4*
};

#ifdef __cplusplus
}
#endif
