// Groups of adjacent elements that are computed together: one vector, or two if that is faster.
//
// The elements of a group may be permuted, which does not affect lane-wise computations: a
// value(i, part) that passes its part to Lanes<T>::load supports any group. float32 tables that are
// combined with groups of T are permuted with order_groups<T>.
#pragma once

#include "kernels/vec_halves.h"

namespace {

// A row in memory.
template <class T>
struct Loaded {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    return Lanes<T>::load(values + i, part);
  }
  Halves operator()(int64_t i, FullHalves part) const { return load_halves(values + i, part); }
  Halves operator()(int64_t i, TailHalves part) const { return load_halves(values + i, part); }

  const T* values;
};

template <class T, int kCount>
struct PlainGroup {
  static constexpr int kVecs = kCount;

  // Set the vectors to value(i, part) for the group at element i.
  template <class Value>
  void set(int64_t i, Value value) {
    for (int k = 0; k < kVecs; ++k) v[k] = value(i + k * kLanes, Full{});
  }
  // Store results computed from values of type W: for 16-bit W, rounding cannot lose a NaN.
  template <class W>
  void store(T* p) const {
    for (int k = 0; k < kVecs; ++k) Lanes<T>::store(p + k * kLanes, v[k], Full{});
  }
  // Store, and set the vectors to the rounded values.
  void round_and_store(T* p) {
    store<T>(p);
    for (int k = 0; k < kVecs; ++k) v[k] = Lanes<T>::load(p + k * kLanes, Full{});
  }
  static void order(float*) {}

  Vec v[kVecs];
};

template <class T>
struct Group : PlainGroup<T, 1> {};

// Whether the first vector of a group contains the even elements, and the second one the odd ones.
template <class T>
constexpr bool kHoldsPairs = false;

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#if !defined(__AVX512F__)
template <>
struct Group<Float16> : PlainGroup<Float16, 2> {};
#endif

// Even elements, then odd ones: each is half of 32 bits, which avoids shuffles.
template <>
struct Group<BFloat16> {
  static constexpr int kVecs = 2;

  template <class Value>
  void set(int64_t i, Value value) {
    v[0] = value(i, Even{});
    v[1] = value(i, Odd{});
  }
  template <class W>
  void store(BFloat16* p) const {
    constexpr bool is_of_16_bits = sizeof(W) == sizeof(BFloat16);
    store_words(p, is_of_16_bits ? pairs_of(v[0], v[1]) : any_pairs_of(v[0], v[1]));
  }
  void round_and_store(BFloat16* p) {
    const auto pairs = pairs_of(v[0], v[1]);
    v[0] = even_of(pairs, BFloat16{});
    v[1] = odd_of(pairs, BFloat16{});
    store_words(p, pairs);
  }
  static void order(float* values) {
    const Vec even = Lanes<float>::load(values, Even{});
    const Vec odd = Lanes<float>::load(values, Odd{});
    Lanes<float>::store(values, even, Full{});
    Lanes<float>::store(values + kLanes, odd, Full{});
  }

  Vec v[kVecs];
};

template <>
constexpr bool kHoldsPairs<BFloat16> = true;

#endif

template <class T>
constexpr int64_t kGroup = Group<T>::kVecs * kLanes;

template <class T, class Value>
inline Group<T> group_of(int64_t i, Value value) {
  Group<T> group;
  group.set(i, value);
  return group;
}

// Permute the n values of a table, whole groups, into the order of groups of T.
template <class T>
inline void order_groups(float* values, int64_t n) {
  for (int64_t i = 0; i < n; i += kGroup<T>) Group<T>::order(values + i);
}

// Store a row of value(i, part) that only supports whole vectors and tails.
template <class T, class Value>
inline void store_vecs(T* out, int64_t n, Value value) {
#if defined(__AVX512FP16__)
  if constexpr (kGivesHalves<Value>) return store_row_of_halves<kAtOnce / 2>(out, n, value);
#endif
  map_vecs(n, value,
           [=](int64_t i, Vec v, auto part) { Lanes<T>::store(out + i, v, part); });
}

// Store a row of value(i, part), computed from values of type W. kBegun vectors are computed before
// the first is stored, so that their latencies overlap. value may read out.
template <class W, int kBegun, class T, class Value>
inline void store_row(T* out, int64_t n, Value value) {
#if defined(__AVX512FP16__)
  if constexpr (kGivesHalves<Value>) return store_row_of_halves<(kBegun + 1) / 2>(out, n, value);
#endif
  constexpr int kGroups = kBegun <= Group<T>::kVecs ? 1 : kBegun / Group<T>::kVecs;
  constexpr int64_t kStep = kGroups * kGroup<T>;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    Group<T> groups[kGroups];
    announce<kStep>(value, i);
    for (int g = 0; g < kGroups; ++g) groups[g].set(i + g * kGroup<T>, value);
    for (int g = 0; g < kGroups; ++g) groups[g].template store<W>(out + i + g * kGroup<T>);
  }
  for (; i + kLanes <= n; i += kLanes) Lanes<T>::store(out + i, value(i, Full{}), Full{});
  if (i < n) Lanes<T>::store(out + i, value(i, Tail{n - i}), Tail{n - i});
}

}  // namespace
