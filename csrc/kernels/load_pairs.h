// Loads pairs of neighbours into two vectors: the first of every pair, and the second.
#pragma once

#include "kernels/vec.h"

namespace {

struct Pairs {
  Vec first;
  Vec second;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

inline Pairs split(__m512i pairs, BFloat16) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
}

inline Pairs split(__m512i pairs, Float16) {
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)),
          _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)))};
}

template <class T>
inline Pairs load_pairs(const T* p, Full) {
  return split(_mm512_loadu_si512(p), T{});
}

inline Pairs load_pairs(const float* p, Full) {
  const __m512i even =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const Vec a = _mm512_loadu_ps(p);
  const Vec b = _mm512_loadu_ps(p + kLanes);
  return {_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

inline Pairs split(__m256i pairs, BFloat16) {
  return {even_of(pairs, BFloat16{}), odd_of(pairs, BFloat16{})};
}

inline Pairs split(__m256i pairs, Float16) {
  const auto widen_lower = [](__m256i lanes) {
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
  };
  return {widen_lower(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff))),
          widen_lower(_mm256_srli_epi32(pairs, 16))};
}

template <class T>
inline Pairs load_pairs(const T* p, Full) {
  return split(load_words(p), T{});
}

inline Pairs load_pairs(const float* p, Full) {
  return {Lanes<float>::load(p, Even{}), Lanes<float>::load(p, Odd{})};
}

#else

template <class T>
inline Pairs load_pairs(const T* p, Full) {
  T first[kLanes];
  T second[kLanes];
  for (int k = 0; k < kLanes; ++k) {
    first[k] = p[2 * k];
    second[k] = p[2 * k + 1];
  }
  return {Lanes<T>::load(first, Full{}), Lanes<T>::load(second, Full{})};
}

#endif

template <class T>
inline Pairs load_pairs(const T* p, Tail tail) {
  T buffer[2 * kLanes] = {};
  memcpy(buffer, p, 2 * static_cast<size_t>(tail.count) * sizeof(T));
  return load_pairs(static_cast<const T*>(buffer), Full{});
}

}  // namespace
