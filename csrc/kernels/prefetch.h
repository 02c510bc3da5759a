// Fetching memory before it is needed.
#pragma once

#include <stdint.h>

namespace {

constexpr int64_t kCacheLine = 64;  // bytes

// Into the L2 cache, which can wait for more lines at once than the L1 can.
inline void prefetch(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(line + i, 0, 2);
}

}  // namespace
