// reshape_and_cache: scatters keys and values into their blocks.
//
// Compiled once, for the baseline CPU: the C library's copy picks its own instructions.
#include "kernels/kv_cache.h"

#include <string.h>

namespace {

void write(const OpweaveCacheWrite& to, int64_t token, int64_t block, int64_t offset,
           int64_t heads, int64_t block_size) {
  const size_t bytes = static_cast<size_t>(to.row_bytes);
  char* target = to.cache + block * to.block_stride + offset * to.row_bytes;
  const char* source = to.tokens + token * to.token_stride;
  for (int64_t h = 0; h < heads; ++h) {
    memcpy(target, source, bytes);
    target += block_size * to.row_bytes;
    source += to.head_stride;
  }
}

}  // namespace

extern "C" void opweave_reshape_and_cache(int64_t begin, int64_t end, void* erased) {
  const OpweaveReshapeAndCache& call = *static_cast<const OpweaveReshapeAndCache*>(erased);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = call.slots[token];
    if (slot < 0) continue;
    const int64_t block = slot / call.block_size;
    const int64_t offset = slot % call.block_size;
    write(call.key, token, block, offset, call.heads, call.block_size);
    write(call.value, token, block, offset, call.heads, call.block_size);
  }
}
