// Fetching memory before it is needed.
#pragma once

#include "kernels/vec.h"

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

// The row that comes next: fetch(i) has element i brought into the L2 cache, while there is work on
// the row before it. By itself a processor fetches no further than to the end of a page. After the
// last row comes the first one.
template <class T>
struct Next {
  void fetch(int64_t i) const { __builtin_prefetch(values + i, 0, 2); }
  Next from(int64_t i) const { return {values + i}; }

  const T* values;
};

// Two rows, or both halves of one.
template <class T>
struct NextTwo {
  void fetch(int64_t i) const {
    __builtin_prefetch(first + i, 0, 2);
    __builtin_prefetch(second + i, 0, 2);
  }

  const T* first;
  const T* second;
};

// Odd elements lie between even ones, whose line has been fetched.
template <class Part>
constexpr bool kIsOdd = false;
template <>
constexpr bool kIsOdd<Odd> = true;

// The values of a row, and a fetch for each.
template <class Value, class Ahead>
struct Fetching {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    if constexpr (!kIsOdd<Part>) next.fetch(i);
    return value(i, part);
  }

  Value value;
  Ahead next;
};

template <class Value, class Ahead>
inline Fetching<Value, Ahead> fetching(Value value, Ahead next) {
  return {value, next};
}

}  // namespace
