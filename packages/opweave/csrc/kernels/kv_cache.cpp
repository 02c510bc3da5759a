// reshape_and_cache: scatters keys and values into their blocks.
//
// Compiled once for the baseline CPU, because memcpy selects its own instructions.
#include "kernels/kv_cache.h"

#include "kernels/cache_rows.h"

extern "C" void opweave_reshape_and_cache(int64_t begin, int64_t end, void* erased) {
  const OpweaveReshapeAndCache& call = *static_cast<const OpweaveReshapeAndCache*>(erased);
  for (int64_t token = begin; token < end; ++token) {
    if (call.slots[token] < 0) continue;
    write_heads(call, call.key, token);
    write_heads(call, call.value, token);
  }
  after_past_caches();
}
