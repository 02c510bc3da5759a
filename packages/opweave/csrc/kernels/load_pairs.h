// Load adjacent pairs into two vectors: the first elements of the pairs, and the second ones.
#pragma once

#include "kernels/vec_halves.h"

namespace {

struct Pairs {
  Vec first;
  Vec second;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

inline Pairs split(__m512i pairs) {
  const __m512i apart =
      _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24,
                       22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i halves = _mm512_permutexvar_epi16(apart, pairs);
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

inline Pairs split(__m256i pairs) {
  const auto widen_lower = [](__m256i lanes) {
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
  };
  return {widen_lower(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff))),
          widen_lower(_mm256_srli_epi32(pairs, 16))};
}

#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

template <class T>
inline Pairs load_pairs(const T* p, Full) {
  return {Lanes<T>::load(p, Even{}), Lanes<T>::load(p, Odd{})};
}

inline Pairs load_pairs(const Float16* p, Full) { return split(load_words(p)); }

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

#if defined(__AVX512FP16__)

struct HalvesPairs {
  Halves first;
  Halves second;
};

inline HalvesPairs load_pairs(const Float16* p, FullHalves) {
  const __m512i firsts =
      _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                       24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i seconds = _mm512_add_epi16(firsts, _mm512_set1_epi16(1));
  const __m512i low = _mm512_loadu_si512(p);
  const __m512i high = _mm512_loadu_si512(p + kHalves);
  return {_mm512_castsi512_ph(_mm512_permutex2var_epi16(low, firsts, high)),
          _mm512_castsi512_ph(_mm512_permutex2var_epi16(low, seconds, high))};
}

inline HalvesPairs load_pairs(const Float16* p, TailHalves tail) {
  Float16 buffer[2 * kHalves] = {};
  memcpy(buffer, p, 2 * static_cast<size_t>(tail.count) * sizeof(Float16));
  return load_pairs(static_cast<const Float16*>(buffer), FullHalves{});
}

#endif

}  // namespace
