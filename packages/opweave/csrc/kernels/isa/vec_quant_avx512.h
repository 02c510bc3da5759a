// The vector operations of quantization with AVX-512; see vec_quant.h.
#pragma once

#include "kernels/vec.h"

namespace {

inline Vec larger_magnitude(Vec so_far, Vec v) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(so_far), magnitude));
}

inline float largest_or_nan(Vec v) {
  const int bits = _mm512_reduce_max_epi32(_mm512_castps_si512(v));
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

using Words = __m512i;

inline Words larger_words(Words a, Words b) { return _mm512_max_epu16(a, b); }

inline Words load_magnitudes(const void* p, Full) {
  return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
}

inline Words load_magnitudes(const void* p, Tail tail) {
  touch(static_cast<const uint16_t*>(p), tail);
  const Words words = _mm512_maskz_loadu_epi16((1u << tail.count) - 1u, p);
  return _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
}

inline uint16_t largest_word(Words words) {
  return largest_half(
      _mm256_max_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1)));
}

// Return the code plus kFp8Bias per lane. It exceeds that of the largest number if |v| does, and is
// negative for NaN, because negative_abs sets the sign.
inline __m512i biased_fp8_of(Vec v) {
  const __m512i exponent = _mm512_set1_epi32(static_cast<int>(kFp8Powers));
  const Vec power = max(splat(kFp8SmallestNormal),
                        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), exponent)));
  const __m512i rounded =
      _mm512_castps_si512(_mm512_fnmadd_ps(negative_abs(v), splat(kFp8Unit), power));
  const __m512i bits = _mm512_castps_si512(power);
  return _mm512_sub_epi32(rounded, _mm512_sub_epi32(bits, _mm512_srli_epi32(bits, kFp8Shift)));
}

// Restore the order after packing four vectors twice, which leaves four lanes of each per quarter.
inline __m512i in_order(__m512i packed) {
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(lanes, packed);
}

inline __m512i fp8_of(const Vec (&v)[kAtOnce], const Vec (&signs)[kAtOnce]) {
  const auto words = [](Vec a, Vec b) {
    return _mm512_sub_epi16(_mm512_packus_epi32(biased_fp8_of(a), biased_fp8_of(b)),
                            _mm512_set1_epi16(kFp8Bias - 1));
  };
  const auto sign_words = [](Vec a, Vec b) {
    return _mm512_packs_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b));
  };
  // Pack the code plus one, so that saturation to 127 gives the code of the largest number, 126,
  // and NaN saturates to -128, which becomes 127.
  const __m512i above = _mm512_packs_epi16(words(v[0], v[1]), words(v[2], v[3]));
  const __m512i codes = _mm512_add_epi8(above, _mm512_set1_epi8(-1));
  const __m512i sign =
      _mm512_packs_epi16(sign_words(signs[0], signs[1]), sign_words(signs[2], signs[3]));
  return in_order(with_signs(codes, sign));
}

// Below the range of int32, the conversion returns the lowest integer.
template <bool kMayExceed>
inline __m512i int32_of(Vec v) {
  if constexpr (!kMayExceed) return _mm512_cvtps_epi32(v);
  const __mmask16 ordered = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
  return _mm512_maskz_cvtps_epi32(ordered, min(splat(127), v));
}

template <bool kMayExceed>
inline __m512i int8_of(const Vec (&v)[kAtOnce]) {
  return in_order(_mm512_packs_epi16(
      _mm512_packs_epi32(int32_of<kMayExceed>(v[0]), int32_of<kMayExceed>(v[1])),
      _mm512_packs_epi32(int32_of<kMayExceed>(v[2]), int32_of<kMayExceed>(v[3]))));
}

inline void store_bytes(void* p, __m512i bytes, Full) { _mm512_storeu_si512(p, bytes); }

inline void store_bytes(void* p, __m512i bytes, Tail tail) {
  touch(static_cast<const char*>(p), tail);
  _mm512_mask_storeu_epi8(p, (1ull << tail.count) - 1, bytes);
}

}  // namespace
