// The plain C interface of paged attention; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// Softmax attention of packed queries [tokens, kv_heads * group, head_size] over caches
// [blocks, kv_heads, block_size, size], whose last two dimensions are contiguous. Strides are in
// elements; out is contiguous. block_size is a multiple of OPWEAVE_PAGED_STEP. Block numbers must
// be valid, and lengths must not be negative.
struct OpweavePagedAttention {
  void* out;
  const float* out_scale;  // the scale of a float8_e4m3fn out; null if out has the dtype
  const void* query;
  const void* key_cache;
  const void* value_cache;
  const int32_t* block_tables;
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  int64_t block_table_stride;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_block_stride;
  int64_t value_block_stride;
  int64_t key_head_stride;
  int64_t value_head_stride;
  int64_t kv_heads;
  int64_t group;
  int64_t head_size;
  int64_t value_size;
  int64_t block_size;
  int64_t window;  // visible positions per query, including its own; 0 for all
  int32_t is_causal;
  float scale;
  float soft_cap;  // 0 for none
  enum OpweaveDtype dtype;
};

#define OPWEAVE_PAGED_STEP 16

// Some queries of one sequence, for some kv heads and the query heads that share them.
struct OpweavePagedPart {
  int64_t sequence;
  int64_t first_token;  // in the sequence
  int64_t tokens;
  int64_t first_head;
  int64_t heads;
};

struct OpweavePagedAttentionKernels {
  // Returns the scratch size of a part with this many tokens and kv heads, in floats.
  int64_t (*scratch_size)(const struct OpweavePagedAttention* call, int64_t tokens, int64_t heads);
  // Computes the outputs of the part. scratch is aligned to 64 bytes.
  void (*run)(const struct OpweavePagedAttention* call, const struct OpweavePagedPart* part,
              float* scratch);
};

#ifdef __cplusplus
}
#endif
