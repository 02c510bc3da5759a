// Where the rows of a token are in a paged cache.
#pragma once

#include <string.h>

#include "kernels/kv_cache.h"

namespace {

// The row of the first head. Those of the others follow at a distance of block_size rows.
inline char* first_row(const OpweaveCacheWrite& to, int64_t slot, int64_t block_size) {
  return to.cache + slot / block_size * to.block_stride + slot % block_size * to.row_bytes;
}

inline void write_heads(const OpweaveCacheWrite& to, int64_t token, int64_t slot, int64_t heads,
                        int64_t block_size) {
  const size_t bytes = static_cast<size_t>(to.row_bytes);
  char* target = first_row(to, slot, block_size);
  const char* source = to.tokens + token * to.token_stride;
  for (int64_t h = 0; h < heads; ++h) {
    memcpy(target, source, bytes);
    target += block_size * to.row_bytes;
    source += to.head_stride;
  }
}

}  // namespace
