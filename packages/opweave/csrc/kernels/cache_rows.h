// Write the rows of a token into a paged cache.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels/kv_cache.h"
#include "kernels/prefetch.h"
#include "kernels/vec.h"

namespace {

// Return the row of the first head in a slot.
inline char* first_row(const OpweaveCacheWrite& to, int64_t slot, int64_t block_size) {
  return to.cache + slot / block_size * to.block_stride + slot % block_size * to.position_stride;
}

// Copy whole cache lines with non-temporal stores, which do not read the target into the CPU
// caches. Call after_past_caches() at the end.
inline void copy_past_caches(char* target, const char* source, int64_t bytes) {
#if defined(__x86_64__)
  touch(source, Tail{bytes});
  touch(target, Tail{bytes});
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(sizeof(__m128i))) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), value);
  }
#else
  memcpy(target, source, static_cast<size_t>(bytes));
#endif
}

// Order the non-temporal stores before later stores of this thread.
inline void after_past_caches() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline bool is_of_lines(const char* target, int64_t bytes) {
  return bytes % kCacheLine == 0 && reinterpret_cast<uintptr_t>(target) % kCacheLine == 0;
}

// Write the rows of a token for every head.
inline void write_heads(const OpweaveReshapeAndCache& call, const OpweaveCacheWrite& to,
                        int64_t token) {
  char* target = first_row(to, call.slots[token], call.block_size);
  const char* source = to.tokens + token * to.token_stride;
  const bool past_caches = call.past_caches && is_of_lines(target, to.row_bytes);
  for (int64_t h = 0; h < call.heads; ++h) {
    if (past_caches) {
      copy_past_caches(target, source, to.row_bytes);
    } else {
      memcpy(target, source, static_cast<size_t>(to.row_bytes));
    }
    target += to.cache_head_stride;
    source += to.head_stride;
  }
}

}  // namespace
