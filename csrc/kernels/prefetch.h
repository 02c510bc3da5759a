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

constexpr int64_t kBytesAhead = 2048;

// The beginning of the row of T that comes next, while there is work on this one: by itself a
// processor fetches no further than to the end of a page. Rows of 32 bits wait for the memory
// anyway.
template <class T>
inline void prefetch_row(const void* row, int64_t width) {
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
    prefetch(row, bytes < kBytesAhead ? bytes : kBytesAhead);
  }
}

// The same for a row that is read once, from p on: the line that is read a little later.
template <class T>
inline void prefetch_ahead(const T* p) {
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    prefetch(reinterpret_cast<const char*>(p) + kBytesAhead, kCacheLine);
  }
}

}  // namespace
