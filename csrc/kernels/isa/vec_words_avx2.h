// Products of 16-bit integers with AVX2; see vec_words.h.
#pragma once

#include "kernels/vec.h"

namespace {

using Words = __m256i;
using Sums32 = __m256i;

inline Words load_words16(const int16_t* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}
inline Sums32 load_sums(const int32_t* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}

inline Words load_packed(const uint8_t* p, Full) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Words load_packed(const uint8_t* p, Tail tail) {
  uint8_t buffer[sizeof(Words)] = {};
  memcpy(buffer, p, static_cast<size_t>(tail.count));
  return load_packed(buffer, Full{});
}

template <int I>
inline Words nibbles(Words v) {
  if constexpr (I == 3) return _mm256_srli_epi16(v, 12);
  const Words low = I == 0 ? v : _mm256_srli_epi16(v, 4 * I);
  return _mm256_and_si256(low, _mm256_set1_epi16(15));
}

inline Sums32 add_products(Sums32 sums, Words a, Words b) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}

inline Vec to_float(Sums32 sums) { return _mm256_cvtepi32_ps(sums); }

struct Spread {
  explicit Spread(const int32_t (&of_lane)[kLanes])
      : places(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(of_lane))) {}
  Vec spread(const float* p) const {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(p), places);
  }

  __m256i places;
};

}  // namespace
