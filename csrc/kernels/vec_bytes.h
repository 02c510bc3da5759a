// 8-bit weights as float32 lanes: int8, and float8_e4m3fn in units of kUnit<Float8>.
//   Lanes<T>::load  kLanes weights, as for other types
//   load_two        2 * kLanes weights, of any type
//
// float8_e4m3fn has the layout of the upper byte of float16 with one exponent bit less. Shifted to
// the fields of float16, a code represents 2^-8 of its value, including denormals. Only NaN, the
// code above the largest number, needs float16's exponent of NaN.
#pragma once

#include "kernels/vec.h"

namespace {

struct Float8 {
  uint8_t bits;
};

template <class W>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Float8> = 256.0f;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

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

#else

typedef uint8_t Bytes __attribute__((vector_size(4)));
typedef int8_t SignedBytes __attribute__((vector_size(4)));

inline Bytes load_bytes(const void* p, Full) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return bytes;
}

inline Bytes load_bytes(const void* p, Tail tail) {
  Bytes bytes = {};
  memcpy(&bytes, p, static_cast<size_t>(tail.count));
  return bytes;
}

inline Vec widen_bytes(Bytes bytes, int8_t) {
  return __builtin_convertvector(reinterpret_cast<SignedBytes>(bytes), Vec);
}

inline Vec widen_bytes(Bytes bytes, Float8) {
  const Bits code = __builtin_convertvector(bytes, Bits);
  const Bits half = ((code & splat_bits(0x7f)) << 7) | ((code & splat_bits(0x80)) << 8);
  return widen(half | ((half + splat_bits(0x80)) & splat_bits(0x4000)), Float16{});
}

#endif

template <>
struct Lanes<int8_t> {
  template <class Part>
  static Vec load(const int8_t* p, Part part) {
    return widen_bytes(load_bytes(p, part), int8_t{});
  }
};

template <>
struct Lanes<Float8> {
  template <class Part>
  static Vec load(const Float8* p, Part part) {
    return widen_bytes(load_bytes(p, part), Float8{});
  }
};

template <class T>
inline void load_two(Vec (&to)[2], const T* from) {
  to[0] = Lanes<T>::load(from, Full{});
  to[1] = Lanes<T>::load(from + kLanes, Full{});
}

}  // namespace
