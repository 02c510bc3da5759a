// Neighbours that are computed together: one vector, or two where that is quicker.
//
// What is stored comes from arithmetic of 16-bit numbers, or is stored as it is: rounding does not
// look for NaN.
//
// A group may have an order of its own, which does not matter to what is computed lane by lane.
// Tables in float32 that meet groups of T are brought into it by order_groups<T>.
#pragma once

#include "kernels/load_pairs.h"
#include "kernels/vec.h"

namespace {

template <class T, int kCount>
struct PlainGroup {
  static constexpr int kVecs = kCount;

  void load(const T* p) {
    for (int k = 0; k < kVecs; ++k) v[k] = Lanes<T>::load(p + k * kLanes, Full{});
  }
  void store(T* p) const {
    for (int k = 0; k < kVecs; ++k) Lanes<T>::store(p + k * kLanes, v[k], Full{});
  }
  static void order(float*) {}

  Vec v[kVecs];
};

template <class T>
struct Group : PlainGroup<T, 1> {};

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)

template <>
struct Group<Float16> : PlainGroup<Float16, 2> {};

// Even elements, then odd ones: each is half of 32 bits already, which spares shuffles.
template <>
struct Group<BFloat16> {
  static constexpr int kVecs = 2;

  void load(const BFloat16* p) {
    const Pairs pairs = load_pairs(p, Full{});
    v[0] = pairs.first;
    v[1] = pairs.second;
  }
  void store(BFloat16* p) const {
    const __m256i even = _mm256_srli_epi32(rounded_bits(v[0]), 16);
    const __m256i joined = _mm256_blend_epi16(even, rounded_bits(v[1]), 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), joined);
  }
  static void order(float* values) {
    const Pairs pairs = load_pairs(static_cast<const float*>(values), Full{});
    Lanes<float>::store(values, pairs.first, Full{});
    Lanes<float>::store(values + kLanes, pairs.second, Full{});
  }

  Vec v[kVecs];
};

#endif

template <class T>
constexpr int64_t kGroup = Group<T>::kVecs * kLanes;

// Bring n values of a table, whole groups, into the order of groups of T.
template <class T>
inline void order_groups(float* values, int64_t n) {
  for (int64_t i = 0; i < n; i += kGroup<T>) Group<T>::order(values + i);
}

}  // namespace
