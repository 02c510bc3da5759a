// Products of 16-bit integers with AVX-512, and its VNNI if present; see vec_words.h.
#pragma once

#include "kernels/vec.h"

namespace {

using Words = __m512i;
using Sums32 = __m512i;

inline Words load_words16(const int16_t* p) { return _mm512_load_si512(p); }
inline Sums32 load_sums(const int32_t* p) { return _mm512_load_si512(p); }

inline Words load_packed(const uint8_t* p, Full) { return _mm512_loadu_si512(p); }
inline Words load_packed(const uint8_t* p, Tail tail) {
  touch(p, tail);
  return _mm512_maskz_loadu_epi8((uint64_t{1} << tail.count) - 1, p);
}

template <int I>
inline Words nibbles(Words v) {
  if constexpr (I == 3) return _mm512_srli_epi16(v, 12);
  const Words low = I == 0 ? v : _mm512_srli_epi16(v, 4 * I);
  return _mm512_and_si512(low, _mm512_set1_epi16(15));
}

inline Sums32 add_products(Sums32 sums, Words a, Words b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}

inline Vec to_float(Sums32 sums) { return _mm512_cvtepi32_ps(sums); }

struct Spread {
  explicit Spread(const int32_t (&of_lane)[kLanes]) : places(_mm512_loadu_si512(of_lane)) {}
  Vec spread(const float* p) const { return _mm512_permutexvar_ps(places, _mm512_loadu_ps(p)); }

  __m512i places;
};

}  // namespace
