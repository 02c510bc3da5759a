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
  Vec spread(Vec v) const { return _mm512_permutexvar_ps(places, v); }
  void advance(int32_t n) { places = _mm512_add_epi32(places, _mm512_set1_epi32(n)); }

  __m512i places;
};

inline Words load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Words load_s8(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <int N>
inline Words shifted_left(Words v) {
  return _mm512_slli_epi16(v, N);
}
template <int N>
inline Words shifted_right(Words v) {
  return _mm512_srli_epi16(v, N);
}
inline Words masked(Words v, int16_t mask) { return _mm512_and_si512(v, _mm512_set1_epi16(mask)); }
inline Words joined_words(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words minus(Words v, int16_t n) { return _mm512_sub_epi16(v, _mm512_set1_epi16(n)); }

inline void load_nibbles(Words (&to)[1], const uint8_t* p) {
  const __m256i bytes =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
  to[0] = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(bytes, 4), 1);
}

#define OPWEAVE_MULTIPLIES_BYTES

template <bool kHigh>
inline Words nibble_bytes(Words packed) {
  const Words low = kHigh ? _mm512_srli_epi16(packed, 4) : packed;
  return _mm512_and_si512(low, _mm512_set1_epi8(15));
}

template <int kLargest>
inline Sums32 add_byte_products(Sums32 sums, Words bytes, const int8_t* of_token) {
  const Words numbers = _mm512_load_si512(of_token);
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, bytes, numbers);
#else
  if constexpr (kLargest < 128) {  // the sum of two products fits into 16 bits
    return add_products(sums, _mm512_maddubs_epi16(bytes, numbers), _mm512_set1_epi16(1));
  }
  const Words even = _mm512_srai_epi16(_mm512_slli_epi16(numbers, 8), 8);
  sums = add_products(sums, masked(bytes, 255), even);
  return add_products(sums, shifted_right<8>(bytes), _mm512_srai_epi16(numbers, 8));
#endif
}

inline Vec two_halves(float a, float b) {
  return _mm512_mask_blend_ps(0xff00, splat(a), splat(b));
}

}  // namespace
