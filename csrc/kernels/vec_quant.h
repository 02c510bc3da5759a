// The vector operations of quantisation, for every instruction set of vec.h:
//   larger_magnitude   max(so_far, |v|) for a non-negative so_far; propagates NaN
//   largest_or_nan     the largest of non-negative lanes; propagates NaN
//   Words              a vector of kWords 16-bit magnitudes
//   larger_words       the element-wise maximum of two vectors
//   load_magnitudes    loads up to kWords 16-bit numbers without their signs
//   largest_word       the largest word; a word above infinity is NaN
//   float_of           a 16-bit number as float32
//   fp8_of             converts kAtOnce vectors to float8_e4m3fn, nearest even, saturated, with NaN
//                      preserved. Takes the signs from another kAtOnce vectors
//   int8_of            converts kAtOnce vectors to int8, nearest even, saturated; NaN becomes 0.
//                      Without kMayExceed, values must not be NaN or exceed 128
//   store_bytes        stores these results, or the first bytes of them
//   quotient           v / divisor, given 1 / divisor; all must be finite, the divisor >= 2^-18
//
// Magnitudes are compared as integers, which have the same order as non-negative floats, with NaN
// above infinity.
//
// Conversion to float8_e4m3fn, which has 3 mantissa bits and normal numbers from 2^-6 on: let p be
// the power of two of |v|, but at least 2^-6. The sum p + 2^-20 |v| in float32 rounds 2^-20 |v| to
// the unit of p, which has the same ratio to it as the step between codes has to |v|. So, as
// integers, the sum minus p is the number of these steps: 8 to 16 for a normal number and 0 to 8
// for a denormal one. Adding 8 per power of two above 2^-6 gives the code. The instructions that
// narrow lanes to bytes saturate.
#pragma once

#include "kernels/vec.h"

namespace {

constexpr float kFp8Max = 448.0f;
constexpr float kFp8SmallestNormal = 0x1p-6f;
constexpr float kFp8Unit = 0x1p-20f;
constexpr uint32_t kFp8Powers = 0x7f800000;  // the exponent of a float32
constexpr int kFp8Shift = 20;                // converts an exponent to multiples of 8
constexpr int kFp8Bias = 8 * (127 - 6);      // the multiple of 8 for 2^-6

constexpr int64_t kWords = 2 * kLanes;

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

inline uint16_t largest_half(__m256i words) {
  const __m128i most =
      _mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  // The instruction finds the minimum, so invert the words.
  const __m128i inverted = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)));
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(inverted));
}

inline float float_of(Float16 value) { return _cvtsh_ss(value.bits); }

inline float float_of(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

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

#else

typedef uint16_t Words __attribute__((vector_size(2 * kWords)));

inline Words larger_words(Words a, Words b) { return a > b ? a : b; }

inline Words load_magnitudes(const void* p, Full) {
  Words words;
  memcpy(&words, p, sizeof(words));
  return words & 0x7fff;
}

inline Words load_magnitudes(const void* p, Tail tail) {
  Words words = {};
  memcpy(&words, p, static_cast<size_t>(tail.count) * sizeof(uint16_t));
  return words & 0x7fff;
}

inline uint16_t largest_word(Words words) {
  uint16_t most = words[0];
  for (int k = 1; k < kWords; ++k) most = words[k] > most ? words[k] : most;
  return most;
}

template <class T>
inline float float_of(T value) {
  return Lanes<T>::load(&value, Tail{1})[0];
}

struct CodeBytes {
  uint8_t values[kAtOnce * kLanes];
};

// Return the low byte of every lane of lanes(k).
template <class LanesOf>
inline CodeBytes low_bytes(LanesOf lanes) {
  typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));
  CodeBytes bytes;
  for (int k = 0; k < kAtOnce; ++k) {
    const ByteLanes low = __builtin_convertvector(lanes(k), ByteLanes);
    memcpy(bytes.values + k * kLanes, &low, sizeof(low));
  }
  return bytes;
}

inline Vec larger_magnitude(Vec so_far, Vec v) {
  const Bits old = bits_of(so_far);
  const Bits magnitude = bits_of(v) & splat_bits(0x7fffffff);
  return as_float(choose(reinterpret_cast<Bits>(magnitude > old), magnitude, old));
}

inline float largest_or_nan(Vec v) {
  const Bits bits = bits_of(v);
  uint32_t most = bits[0];
  for (int k = 1; k < kLanes; ++k) most = bits[k] > most ? bits[k] : most;
  float result;
  memcpy(&result, &most, sizeof(result));
  return result;
}

inline Bits fp8_of(Vec v) {
  const Bits largest = bits_of(splat(kFp8Max));
  const Bits exponent = splat_bits(kFp8Powers);
  const Bits magnitude = bits_of(v) & splat_bits(0x7fffffff);
  const Bits is_nan = reinterpret_cast<Bits>(magnitude > exponent);
  const Bits bounded = magnitude < largest ? magnitude : largest;
  const Bits power = bits_of(max(splat(kFp8SmallestNormal), as_float(bounded & exponent)));
  const Bits rounded = bits_of(as_float(power) + as_float(bounded) * splat(kFp8Unit));
  const Bits code = rounded - power + (power >> kFp8Shift) - splat_bits(kFp8Bias);
  return code | (is_nan & splat_bits(1));  // NaN is the code after the largest number
}

inline CodeBytes fp8_of(const Vec (&v)[kAtOnce], const Vec (&signs)[kAtOnce]) {
  return low_bytes(
      [&](int k) { return fp8_of(v[k]) | ((bits_of(signs[k]) >> 24) & splat_bits(0x80)); });
}

template <bool>  // kMayExceed
inline CodeBytes int8_of(const Vec (&v)[kAtOnce]) {
  return low_bytes([&](int k) {
    // Adding 1.5 * 2^23 rounds to an integer in the low bits.
    const Bits rounded = bits_of(min(splat(127), max(splat(-128), v[k])) + splat(0x1.8p23f));
    return rounded & reinterpret_cast<Bits>(v[k] == v[k]);
  });
}

inline void store_bytes(void* p, const CodeBytes& bytes, Full) { memcpy(p, &bytes, sizeof(bytes)); }

inline void store_bytes(void* p, const CodeBytes& bytes, Tail tail) {
  memcpy(p, &bytes, static_cast<size_t>(tail.count));
}

#endif

#if defined(__FMA__)
// Return the correctly rounded quotient with one correction step, which is cheaper than a division
// but loses the sign of -0. If the remainder is too small to be exact, the code is 0 anyway.
inline Vec quotient(Vec v, Vec divisor, Vec reciprocal) {
  const Vec estimate = mul(v, reciprocal);
  const Vec remainder = fma(estimate, sub(splat(-0.0f), divisor), v);
  return fma(remainder, reciprocal, estimate);
}
#else
inline Vec quotient(Vec v, Vec divisor, Vec) { return div(v, divisor); }
#endif

}  // namespace
