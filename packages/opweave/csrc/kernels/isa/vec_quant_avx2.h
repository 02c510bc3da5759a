// The vector operations of quantization with AVX2; see vec_quant.h.
#pragma once

#include "kernels/vec.h"

namespace {

inline Vec larger_magnitude(Vec so_far, Vec v) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(so_far), magnitude));
}

inline float largest_or_nan(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

using Words = __m256i;

inline Words larger_words(Words a, Words b) { return _mm256_max_epu16(a, b); }

inline Words load_magnitudes(const void* p, Full) {
  const Words words = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return _mm256_and_si256(words, _mm256_set1_epi16(0x7fff));
}

inline Words load_magnitudes(const void* p, Tail tail) {
  Words words = _mm256_setzero_si256();
  memcpy(&words, p, static_cast<size_t>(tail.count) * sizeof(uint16_t));
  return load_magnitudes(&words, Full{});
}

inline uint16_t largest_word(Words words) { return largest_half(words); }

inline __m256i biased_fp8_of(Vec v) {
  const Vec exponent = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kFp8Powers)));
  const Vec power = max(splat(kFp8SmallestNormal), _mm256_and_ps(v, exponent));
  const __m256i rounded =
      _mm256_castps_si256(_mm256_fnmadd_ps(negative_abs(v), splat(kFp8Unit), power));
  const __m256i bits = _mm256_castps_si256(power);
  return _mm256_sub_epi32(rounded, _mm256_sub_epi32(bits, _mm256_srli_epi32(bits, kFp8Shift)));
}

inline __m256i in_order(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline __m256i fp8_of(const Vec (&v)[kAtOnce], const Vec (&signs)[kAtOnce]) {
  const auto words = [](Vec a, Vec b) {
    return _mm256_sub_epi16(_mm256_packus_epi32(biased_fp8_of(a), biased_fp8_of(b)),
                            _mm256_set1_epi16(kFp8Bias - 1));
  };
  const auto sign_words = [](Vec a, Vec b) {
    return _mm256_packs_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
  };
  const __m256i above = _mm256_packs_epi16(words(v[0], v[1]), words(v[2], v[3]));
  const __m256i codes = _mm256_add_epi8(above, _mm256_set1_epi8(-1));
  const __m256i sign =
      _mm256_packs_epi16(sign_words(signs[0], signs[1]), sign_words(signs[2], signs[3]));
  const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
  return in_order(_mm256_or_si256(codes, _mm256_and_si256(sign, top)));
}

template <bool kMayExceed>
inline __m256i int32_of(Vec v) {
  if constexpr (!kMayExceed) return _mm256_cvtps_epi32(v);
  const __m256i ordered = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q));
  return _mm256_and_si256(_mm256_cvtps_epi32(min(splat(127), v)), ordered);
}

template <bool kMayExceed>
inline __m256i int8_of(const Vec (&v)[kAtOnce]) {
  return in_order(_mm256_packs_epi16(
      _mm256_packs_epi32(int32_of<kMayExceed>(v[0]), int32_of<kMayExceed>(v[1])),
      _mm256_packs_epi32(int32_of<kMayExceed>(v[2]), int32_of<kMayExceed>(v[3]))));
}

inline void store_bytes(void* p, __m256i bytes, Full) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), bytes);
}

inline void store_bytes(void* p, __m256i bytes, Tail tail) {
  memcpy(p, &bytes, static_cast<size_t>(tail.count));
}

}  // namespace
