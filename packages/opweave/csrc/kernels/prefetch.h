// Software prefetching; tuning.h says how much for a CPU model.
#pragma once

#include "kernels/tuning.h"
#include "kernels/vec_halves.h"

namespace {

constexpr int64_t kCacheLine = 64;  // bytes

template <int kLocality>
inline void prefetch_lines(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(line + i, 0, kLocality);
}

// Prefetch into the L2 cache, which supports more outstanding fetches than the L1 cache.
inline void prefetch(const void* from, int64_t bytes) { prefetch_lines<2>(from, bytes); }

// Prefetch into the L1 cache, shortly before the memory is needed.
inline void prefetch_near(const void* from, int64_t bytes) { prefetch_lines<3>(from, bytes); }

// The next rows: fetch(i) prefetches element i of each row into the L2 cache, during the work on
// the current rows. Hardware prefetchers stop at page boundaries. Prefetches are spread as evenly
// as possible, because a burst delays loads that need the same fill buffers. The first row follows
// the last one. Output rows are prefetched too, because a line is read before it is written.
template <class... Rows>
struct Next {
  void fetch(int64_t) const {}
  template <int64_t kElements>
  void fetch_span(int64_t) const {}
  Next from(int64_t) const { return {}; }
};

template <class T, class... Rows>
struct Next<T, Rows...> {
  void fetch(int64_t i) const {
    __builtin_prefetch(row + i, 0, 2);
    others.fetch(i);
  }
  template <int64_t kElements>
  __attribute__((always_inline)) void fetch_span(int64_t i) const {
    static_assert(kElements > 0, "a step too short to be divided");
    constexpr int64_t kStep = kCacheLine / static_cast<int64_t>(sizeof(T));
    OPWEAVE_UNROLL
    for (int64_t k = 0; k < kElements; k += kStep) __builtin_prefetch(row + i + k, 0, 2);
    others.template fetch_span<kElements>(i);
  }
  Next from(int64_t i) const { return {row + i, others.from(i)}; }

  const T* row;
  Next<Rows...> others;
};

inline Next<> next_rows() { return {}; }

template <class T, class... Rows>
inline Next<T, Rows...> next_rows(const T* row, const Rows*... others) {
  return {row, next_rows(others...)};
}

// Return Next for these rows if kIsWanted, otherwise a no-op.
template <bool kIsWanted, class... Rows>
inline auto next_rows_if(const Rows*... rows) {
  if constexpr (kIsWanted) {
    return next_rows(rows...);
  } else {
    return next_rows();
  }
}

// Prefetches half of the next rows, from element `first` on, in one of several passes over a row.
template <class Ahead>
struct Half {
  template <int64_t kElements>
  __attribute__((always_inline)) void fetch_span(int64_t i) const {
    next.template fetch_span<kElements / 2>(first + i / 2);
  }

  Half from(int64_t i) const { return {next, first + i / 2}; }

  Ahead next;
  int64_t first;
};

template <class Ahead>
inline Half<Ahead> half_of(Ahead next, int64_t first) {
  return {next, first};
}

// The prefetches of the first and of the second of two passes over a row.
template <class First, class Second>
struct Walks {
  template <int64_t kElements>
  __attribute__((always_inline)) void fetch_span(int64_t i) const {
    first.template fetch_span<kElements>(i);
    second.template fetch_span<kElements>(i);
  }

  Walks from(int64_t i) const { return {first.from(i), second.from(i)}; }

  First first;
  Second second;
};

template <class First, class Second>
inline Walks<First, Second> walks(First first, Second second) {
  return {first, second};
}

// Return prefetches of half of the next rows in each of two passes over n elements, or of
// everything in the first one if it takes longer and the tuning says so.
template <bool kFirstIsLong = false, class Ahead>
inline auto two_walks(Ahead next, int64_t n) {
  if constexpr (kFirstIsLong && Tuning::kFetchesInLongPass) {
    return walks(next, next_rows());
  } else {
    return walks(half_of(next, 0), half_of(next, n / 2));
  }
}

// The prefetches of three passes: a quick one, such as a sum or a maximum, and the two others.
template <class Quick, class First, class Second>
struct ThreeWalks {
  Quick quick;
  Walks<First, Second> others;
};

template <class Quick, class First, class Second>
inline ThreeWalks<Quick, First, Second> three_walks(Quick quick, First first, Second second) {
  return {quick, walks(first, second)};
}

// Return prefetches of a quarter in the quick pass over n elements and of half in the last one, or
// of nothing in the quick pass and otherwise as in two_walks.
template <bool kInQuick, bool kFirstIsLong = false, class Ahead>
inline auto three_walks(Ahead next, int64_t n) {
  const auto others = two_walks<kFirstIsLong>(next, n);
  if constexpr (kInQuick && !(kFirstIsLong && Tuning::kFetchesInLongPass)) {
    return three_walks(half_of(others.first, 0), half_of(others.first, n / 2), others.second);
  } else {
    return three_walks(next_rows(), others.first, others.second);
  }
}

// Return how many rows ahead to prefetch if the work begins with a quick pass over the whole row,
// such as a sum or a maximum: with one row ahead, the end of a short row would arrive too late.
template <class T>
inline int64_t rows_ahead(int64_t width) {
  return width * static_cast<int64_t>(sizeof(T)) <= 4096 ? 2 : 1;
}

// Odd elements are in the same cache lines as even ones, which are already prefetched.
template <class Part>
constexpr bool kIsOdd = false;
template <>
constexpr bool kIsOdd<Odd> = true;

// Computes the values of a row, and prefetches for each vector.
template <class Value, class Ahead>
struct Fetching {
  template <class Part>
  auto operator()(int64_t i, Part part) const {
    if constexpr (!kIsOdd<Part>) next.fetch(i);
    return value(i, part);
  }

  Value value;
  Ahead next;
};

template <class Value, class Ahead>
constexpr bool kGivesHalves<Fetching<Value, Ahead>> = kGivesHalves<Value>;

template <class Value, class Ahead>
inline Fetching<Value, Ahead> fetching(Value value, Ahead next) {
  return {value, next};
}

// Like Fetching, for loops that call announce<kElements>(value, i) at the beginning of a step,
// which prefetches once for the whole step.
template <class Value, class Ahead>
struct Paced {
  template <class Part>
  auto operator()(int64_t i, Part part) const {
    return value(i, part);
  }

  Value value;
  Ahead next;
};

template <class Value, class Ahead>
constexpr bool kGivesHalves<Paced<Value, Ahead>> = kGivesHalves<Value>;

template <class Value, class Ahead>
inline Paced<Value, Ahead> paced(Value value, Ahead next) {
  return {value, next};
}

template <int64_t kElements, class Value, class Ahead>
__attribute__((always_inline)) inline void announce(const Paced<Value, Ahead>& value, int64_t i) {
  value.next.template fetch_span<kElements>(i);
}

// Whether the hardware prefetcher also crosses page boundaries for rows of T with several passes,
// or with one output and two inputs.
template <class T>
constexpr bool kFollowsRows = false;
template <>
constexpr bool kFollowsRows<BFloat16> = Tuning::kFollowsPages;

// Whether to prefetch rows of T for short computations. Without AVX-512, 32-bit rows are
// memory-bound anyway, and prefetching slows them down.
template <class T>
constexpr bool kIsFetched = sizeof(T) == sizeof(uint16_t) || kLanes == 16;

template <bool kIsWanted, class Value, class Ahead>
inline auto fetching_if(Value value, Ahead next) {
  if constexpr (kIsWanted) {
    return fetching(value, next);
  } else {
    return value;
  }
}

}  // namespace
