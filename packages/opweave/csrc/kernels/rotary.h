// The plain C interface of the rotary kernels; see kernels.h for the rules.
#pragma once

#include "core/types.h"
#include "kernels/kv_cache.h"

#ifdef __cplusplus
extern "C" {
#endif

// The heads of every token: operand 0 of `tokens` is out, operand 1 is x; out may be x. Strides
// between heads are in bytes.
struct OpweaveHeads {
  void* out;
  const void* x;
  struct OpweaveRows tokens;
  int64_t count;
  int64_t out_stride;
  int64_t x_stride;
  const void* weight;  // of the norm before the rotation, head_size elements, or null
};

// Rotate the first rotary_size elements of every head by the angles of its token's position. A row
// of the cache holds rotary_size / 2 cosines, then as many sines; its stride is in elements. Every
// position is in [-cache_rows, cache_rows), and a negative one counts from the end.
struct OpweaveRotary {
  struct OpweaveHeads query;
  struct OpweaveHeads key;
  const void* positions;
  const void* cache;
  int64_t cache_rows;
  int64_t cache_stride;
  int64_t head_size;
  int64_t rotary_size;
  int32_t is_neox;
  enum OpweaveDtype dtype;
  enum OpweaveDtype cache_dtype;      // dtype or OPWEAVE_FLOAT32
  enum OpweaveDtype positions_dtype;  // OPWEAVE_INT64 or OPWEAVE_INT32
  float epsilon;                      // of the norm
  enum OpweaveDtype weight_dtype;     // dtype or OPWEAVE_FLOAT32
};

#define OPWEAVE_MAX_ROTARY_SIZE 1024

// Rotation that writes the rotated keys and the values into the slots of their tokens in a paged
// cache. Both operands of key.tokens are x; key.out is not used, and cache.key describes only the
// target.
struct OpweaveRotaryToCache {
  struct OpweaveRotary rotary;
  struct OpweaveReshapeAndCache cache;
};

struct OpweaveRotaryKernels {
  OpweaveRangeKernel rotary_embedding;  // call: OpweaveRotary*; rows are tokens
  OpweaveRangeKernel qk_norm_rope;      // call: OpweaveRotary*; rows are tokens
  // call: OpweaveRotaryToCache*; rows are tokens. If two tokens have the same slot and run
  // concurrently, the result may be a mix of both.
  OpweaveRangeKernel rope_reshape_and_cache;
};

#ifdef __cplusplus
}
#endif
