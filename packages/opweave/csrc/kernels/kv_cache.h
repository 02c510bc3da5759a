// The plain C interface of reshape_and_cache; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// Copies rows of tokens into a paged cache [blocks, heads, block_size, head_size]. Strides are in
// bytes; a row is the head_size elements of one head, contiguous on both sides.
struct OpweaveCacheWrite {
  char* cache;
  const char* tokens;
  int64_t block_stride;  // of the cache, like the next two
  int64_t cache_head_stride;
  int64_t position_stride;  // between the positions of a block
  int64_t token_stride;
  int64_t head_stride;  // of tokens
  int64_t row_bytes;
};

struct OpweaveReshapeAndCache {
  struct OpweaveCacheWrite key;
  struct OpweaveCacheWrite value;
  const int64_t* slots;  // below blocks * block_size; negative slots are skipped
  int64_t heads;
  int64_t block_size;
  int past_caches;  // whether to use non-temporal stores
};

// call: OpweaveReshapeAndCache*; rows are tokens. If two tokens have the same slot and run
// concurrently, the result may be a mix of both.
void opweave_reshape_and_cache(int64_t begin, int64_t end, void* call);

#ifdef __cplusplus
}
#endif
