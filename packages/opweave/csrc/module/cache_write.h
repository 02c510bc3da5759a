// Argument checks of the ops that write tokens into a paged cache.
#pragma once

#include "kernels/kv_cache.h"
#include "module/shapes.h"

namespace opweave {

inline void check_tokens(const View& x, const View& slots) {
  check_dtype(x, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  if (x.rank != 3 || x.sizes[0] != slots.sizes[0]) {
    refuse_shape(x, "[" + std::to_string(slots.sizes[0]) +
                        ", kv_heads, head_size], one token for each slot");
  }
  check_unit_stride(x);
}

inline void check_cache_of(const View& cache, const View& x) {
  check_same_dtype(cache, x);
  if (cache.rank != 4 || cache.sizes[1] != x.sizes[1] || cache.sizes[3] != x.sizes[2]) {
    refuse_shape(cache, "[blocks, " + std::to_string(x.sizes[1]) + ", block_size, " +
                            std::to_string(x.sizes[2]) + "]");
  }
  check_unit_stride(cache);
}

inline void check_slots(const View& slots, const View& cache) {
  const int64_t* values = reinterpret_cast<const int64_t*>(slots.data);
  const int64_t count = cache.sizes[0] * cache.sizes[2];
  for (int64_t i = 0; i < slots.sizes[0]; ++i) {
    if (values[i] >= -1 && values[i] < count) continue;
    throw CheckFailed("slot " + std::to_string(values[i]) + " of token " + std::to_string(i) +
                      " is not in a cache of " + std::to_string(cache.sizes[0]) + " blocks of " +
                      std::to_string(cache.sizes[2]) +
                      " positions, nor -1 for no slot; nothing was changed");
  }
}

inline OpweaveCacheWrite write_of(const View& cache, const View& x) {
  const int64_t size = x.element_size();
  OpweaveCacheWrite write;
  write.cache = cache.data;
  write.tokens = x.data;
  write.block_stride = cache.strides[0] * size;
  write.cache_head_stride = cache.strides[1] * size;
  write.position_stride = cache.strides[2] * size;
  write.token_stride = x.strides[0] * size;
  write.head_stride = x.strides[1] * size;
  write.row_bytes = x.sizes[2] * size;
  return write;
}

// Return the extent in bytes over the dimensions whose strides are not multiples of step.
inline int64_t width_within(const View& view, int64_t step) {
  int64_t width = view.element_size();
  for (int d = 0; d < view.rank; ++d) {
    const int64_t stride = view.strides[d] * view.element_size();
    if (stride % step != 0) width += (view.sizes[d] - 1) * stride;
  }
  return width;
}

// Return whether two caches are interleaved in one tensor, by blocks, heads or positions: within
// each step of some stride, they occupy disjoint ranges.
inline bool alternate(const View& a, const View& b) {
  for (const View* view : {&a, &b}) {
    for (int d = 0; d < view->rank; ++d) {
      const int64_t step = view->strides[d] * view->element_size();
      if (step <= 0 || view->sizes[d] <= 1) continue;
      int64_t shift = (b.data - a.data) % step;
      if (shift < 0) shift += step;
      if (shift >= width_within(a, step) && shift + width_within(b, step) <= step) return true;
    }
  }
  return false;
}

// Calls that write at least this many bytes use non-temporal stores. These are long prompts: by the
// time attention reads the first keys, the last ones would have evicted them from the CPU caches.
constexpr int64_t kPastCaches = int64_t{8} << 20;

// Check the arguments, and return the call that writes key and value, [tokens, heads, size], into
// their slots of the caches.
inline OpweaveReshapeAndCache cache_write(const View& key, const View& value, const View& key_cache,
                                          const View& value_cache, const View& slot_mapping) {
  check_dtype(slot_mapping, {OPWEAVE_INT64});
  if (slot_mapping.rank != 1) refuse_shape(slot_mapping, "[tokens]");
  check_contiguous(slot_mapping);
  check_tokens(key, slot_mapping);
  check_tokens(value, slot_mapping);
  check_same_dtype(value, key);
  check_cache_of(key_cache, key);
  check_cache_of(value_cache, value);
  if (value.sizes[1] != key.sizes[1] || value_cache.sizes[0] != key_cache.sizes[0] ||
      value_cache.sizes[2] != key_cache.sizes[2]) {
    refuse_shape(value_cache, "[" + std::to_string(key_cache.sizes[0]) + ", " +
                                  std::to_string(key_cache.sizes[1]) + ", " +
                                  std::to_string(key_cache.sizes[2]) +
                                  ", head_size], as key_cache has it");
  }
  if (!alternate(key_cache, value_cache)) check_disjoint(key_cache, value_cache);
  for (const View* cache : {&key_cache, &value_cache}) {
    for (const View* other : {&key, &value, &slot_mapping}) check_disjoint(*cache, *other);
  }
  check_slots(slot_mapping, key_cache);
  OpweaveReshapeAndCache call;
  call.key = write_of(key_cache, key);
  call.value = write_of(value_cache, value);
  call.slots = reinterpret_cast<const int64_t*>(slot_mapping.data);
  call.heads = key.sizes[1];
  call.block_size = key_cache.sizes[2];
  const int64_t token_bytes = call.heads * (call.key.row_bytes + call.value.row_bytes);
  call.past_caches = slot_mapping.sizes[0] * token_bytes >= kPastCaches;
  return call;
}

}  // namespace opweave
