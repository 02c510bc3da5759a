// 8-bit weights as float32 lanes with AVX-512; see vec_bytes.h.
#pragma once

#include "kernels/vec.h"

namespace {

inline __m128i load_bytes(const void* p, Full) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

inline __m128i load_bytes(const void* p, Tail tail) {
  touch(static_cast<const char*>(p), tail);
  return _mm_maskz_loadu_epi8(mask_of(tail), p);
}

inline Vec widen_bytes(__m128i bytes, int8_t) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

inline Vec widen_bytes(__m128i bytes, Float8) {
  const __m256i signs = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // twice: bits 14, 15
  const __m256i half = _mm256_and_si256(signs, _mm256_set1_epi16(static_cast<short>(0xbfff)));
  const __m256i above = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  // 0xf8: half | (above & 0x4000), bit by bit.
  return widen(_mm256_ternarylogic_epi32(half, above, _mm256_set1_epi16(0x4000), 0xf8), Float16{});
}

// Like load, for 32 codes with the same number of instructions.
inline void load_two(Vec (&to)[2], const Float8* from) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m512i signs = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
  const __m512i half = _mm512_and_si512(signs, _mm512_set1_epi16(static_cast<short>(0xbfff)));
  const __m512i above = _mm512_add_epi16(half, _mm512_set1_epi16(0x80));
  const __m512i all =
      _mm512_ternarylogic_epi32(half, above, _mm512_set1_epi16(0x4000), 0xf8);
  to[0] = widen(_mm512_castsi512_si256(all), Float16{});
  to[1] = widen(_mm512_extracti64x4_epi64(all, 1), Float16{});
}

}  // namespace
