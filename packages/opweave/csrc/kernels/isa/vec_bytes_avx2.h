// 8-bit weights as float32 lanes with AVX2; see vec_bytes.h.
#pragma once

#include "kernels/vec.h"

namespace {

inline __m128i load_bytes(const void* p, Full) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}

inline __m128i load_bytes(const void* p, Tail tail) {
  __m128i bytes = _mm_setzero_si128();
  memcpy(&bytes, p, static_cast<size_t>(tail.count));
  return bytes;
}

inline Vec widen_bytes(__m128i bytes, int8_t) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

inline Vec widen_bytes(__m128i bytes, Float8) {
  const __m128i signs = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);  // twice: bits 14 and 15
  const __m128i half = _mm_and_si128(signs, _mm_set1_epi16(static_cast<short>(0xbfff)));
  const __m128i above = _mm_add_epi16(half, _mm_set1_epi16(0x80));
  return widen(_mm_or_si128(half, _mm_and_si128(above, _mm_set1_epi16(0x4000))), Float16{});
}

}  // namespace
