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
  Vec spread(Vec v) const { return _mm256_permutevar8x32_ps(v, places); }
  void advance(int32_t n) { places = _mm256_add_epi32(places, _mm256_set1_epi32(n)); }

  __m256i places;
};

inline Words load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Words load_s8(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int N>
inline Words shifted_left(Words v) {
  return _mm256_slli_epi16(v, N);
}
template <int N>
inline Words shifted_right(Words v) {
  return _mm256_srli_epi16(v, N);
}
inline Words masked(Words v, int16_t mask) { return _mm256_and_si256(v, _mm256_set1_epi16(mask)); }
inline Words joined_words(Words a, Words b) { return _mm256_or_si256(a, b); }
inline Words minus(Words v, int16_t n) { return _mm256_sub_epi16(v, _mm256_set1_epi16(n)); }

inline void load_nibbles(Words (&to)[2], const uint8_t* p) {
  const Words bytes = load_u8(p);
  to[0] = masked(bytes, 15);
  to[1] = shifted_right<4>(bytes);
}

#define OPWEAVE_MULTIPLIES_BYTES

template <bool kHigh>
inline Words nibble_bytes(Words packed) {
  const Words low = kHigh ? _mm256_srli_epi16(packed, 4) : packed;
  return _mm256_and_si256(low, _mm256_set1_epi8(15));
}

template <int kLargest>
inline Sums32 add_byte_products(Sums32 sums, Words bytes, const int8_t* of_token) {
  const Words numbers = _mm256_load_si256(reinterpret_cast<const __m256i*>(of_token));
  if constexpr (kLargest < 128) {  // the sum of two products fits into 16 bits
    return add_products(sums, _mm256_maddubs_epi16(bytes, numbers), _mm256_set1_epi16(1));
  }
  const Words even = _mm256_srai_epi16(_mm256_slli_epi16(numbers, 8), 8);
  sums = add_products(sums, masked(bytes, 255), even);
  return add_products(sums, shifted_right<8>(bytes), _mm256_srai_epi16(numbers, 8));
}

}  // namespace
