// Fetching memory before it is needed.
#pragma once

#include "kernels/vec_halves.h"

namespace {

constexpr int64_t kCacheLine = 64;  // bytes

template <int kLocality>
inline void prefetch_lines(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(line + i, 0, kLocality);
}

// Into the L2 cache, which can wait for more lines at once than the L1 can.
inline void prefetch(const void* from, int64_t bytes) { prefetch_lines<2>(from, bytes); }

// Into the L1 cache, shortly before it is needed.
inline void prefetch_near(const void* from, int64_t bytes) { prefetch_lines<3>(from, bytes); }

// Rows that come next: fetch(i) has element i of each brought into the L2 cache, while there is
// work on the rows before them. By itself a processor fetches no further than to the end of a page.
// Fetches are spread over the time as evenly as can be: a burst makes loads wait that need the same
// buffers. After the last row comes the first one. Rows that are written count as well: a line is
// read before it is written.
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

// The same if such rows are to be fetched.
template <bool kIsWanted, class... Rows>
inline auto next_rows_if(const Rows*... rows) {
  if constexpr (kIsWanted) {
    return next_rows(rows...);
  } else {
    return next_rows();
  }
}

// Half of what comes next, from element `first` on, for one of several walks along a row.
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

// What to fetch in the first of two walks along a row, and in the second one; in one walk, both.
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

// Half of what comes next in either walk of n elements. If the first one is the longer one, a Zen 4
// has all of it fetched there.
template <bool kFirstIsLong = false, class Ahead>
inline auto two_walks(Ahead next, int64_t n) {
  if constexpr (kFirstIsLong && kIsZen) {
    return walks(next, next_rows());
  } else {
    return walks(half_of(next, 0), half_of(next, n / 2));
  }
}

// The same where a quick walk, a sum or a maximum, comes before the two.
template <class Quick, class First, class Second>
struct ThreeWalks {
  Quick quick;
  Walks<First, Second> others;
};

template <class Quick, class First, class Second>
inline ThreeWalks<Quick, First, Second> three_walks(Quick quick, First first, Second second) {
  return {quick, walks(first, second)};
}

// A quarter in the quick walk of n elements, or nothing, and half in the last one, or as two_walks.
template <bool kInQuick, bool kFirstIsLong = false, class Ahead>
inline auto three_walks(Ahead next, int64_t n) {
  const auto others = two_walks<kFirstIsLong>(next, n);
  if constexpr (kInQuick && !(kFirstIsLong && kIsZen)) {
    return three_walks(half_of(others.first, 0), half_of(others.first, n / 2), others.second);
  } else {
    return three_walks(next_rows(), others.first, others.second);
  }
}

// How many rows ahead to fetch where work begins with a quick walk along the whole row, a sum or a
// maximum: the end of a short row would come too late for it.
template <class T>
inline int64_t rows_ahead(int64_t width) {
  return width * static_cast<int64_t>(sizeof(T)) <= 4096 ? 2 : 1;
}

// Odd elements lie between even ones, whose line has been fetched.
template <class Part>
constexpr bool kIsOdd = false;
template <>
constexpr bool kIsOdd<Odd> = true;

// The values of a row, and a fetch for each.
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

// The same, for loops that say where a step of so many elements begins: announce<kElements>(value, i)
// fetches once for the whole step.
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

// Whether the processor goes on into the next page by itself while it reads one row at a time, so
// that it takes longer if that is fetched, too. So does Zen 4.
constexpr bool kFollowsPages = kIsZen;

// Whether it does so for rows of T, too, that are walked several times or written beside two that
// are read.
template <class T>
constexpr bool kFollowsRows = false;
template <>
constexpr bool kFollowsRows<BFloat16> = kFollowsPages;

// Whether to fetch rows of T for work of a few steps. Those of 32 bits, which wait for the memory
// anyway, take longer then without AVX-512.
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
