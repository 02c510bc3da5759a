// The vector operations of quantisation, for every instruction set of vec.h:
//   larger_magnitude   max(so_far, |v|) of non-negative so_far; a NaN wins
//   largest_or_nan     the largest lane of non-negative ones; a NaN wins
//   store_fp8          to float8_e4m3fn, nearest even, saturated; NaN stays
//   store_int8         to int8, nearest even, saturated; NaN becomes 0
//   quotient           v / divisor, given 1 / divisor; all finite, the divisor at least 2^-18
//
// Magnitudes are compared as integers: there the order of non-negative floats is the same, and NaN
// is above infinity.
#pragma once

#include "kernels/vec.h"

namespace {

// float8_e4m3fn: 3 bits of mantissa, normal from 2^-6 on, denormals in steps of 2^-9.
constexpr uint32_t kFp8SmallestNormal = (127u - 6u) << 23;
constexpr uint32_t kFp8Bias = (127u - 7u) << 23;  // float32's bias less float8's
constexpr uint32_t kFp8Half = 0x7ffff;            // less than half a unit of the 20 bits cut off
constexpr uint32_t kFp8Denormals = 0x46800000;    // 2^14: adding it rounds to steps of 2^-9
// The code above that of 448 is NaN. So min(448, |v|), which keeps NaN, and then the smaller one of
// that and 480 as integers make NaN what rounds to that code.
constexpr float kFp8Max = 448.0f;
constexpr uint32_t kFp8Nan = 0x43f00000;  // 480

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

inline Vec larger_magnitude(Vec so_far, Vec v) {
  const __m512i magnitude =
      _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(so_far), magnitude));
}

inline float largest_or_nan(Vec v) {
  const int bits = _mm512_reduce_max_epi32(_mm512_castps_si512(v));
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

inline __m128i fp8_of(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const Vec unbounded =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  const __m512i magnitude = _mm512_min_epu32(_mm512_castps_si512(min(splat(kFp8Max), unbounded)),
                                             _mm512_set1_epi32(static_cast<int>(kFp8Nan)));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
  const __m512i half = _mm512_set1_epi32(static_cast<int>(kFp8Half - kFp8Bias));
  __m512i code = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(magnitude, odd), half), 20);
  const __m512i smallest = _mm512_set1_epi32(static_cast<int>(kFp8SmallestNormal));
  const __m512i denormals = _mm512_set1_epi32(static_cast<int>(kFp8Denormals));
  const __m512i shifted = _mm512_castps_si512(
      _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(denormals)));
  code = _mm512_mask_sub_epi32(code, _mm512_cmplt_epu32_mask(magnitude, smallest), shifted,
                               denormals);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

inline __m128i int8_of(Vec v) {
  const __mmask16 ordered = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
  const Vec clamped = min(splat(127), max(splat(-128), v));
  return _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(ordered, clamped));
}

inline void store_bytes(void* p, __m128i bytes, Full) {
  _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
}

inline void store_bytes(void* p, __m128i bytes, Tail tail) {
  touch(static_cast<const char*>(p), tail);
  _mm_mask_storeu_epi8(p, mask_of(tail), bytes);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

inline Vec larger_magnitude(Vec so_far, Vec v) {
  const __m256i magnitude =
      _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(so_far), magnitude));
}

inline float largest_or_nan(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

// The low byte of each 32-bit lane, in the lower half.
inline __m128i low_bytes(__m256i lanes) {
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  return _mm_packus_epi16(words, words);
}

inline __m128i fp8_of(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const Vec unbounded =
      _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  const __m256i magnitude = _mm256_min_epu32(_mm256_castps_si256(min(splat(kFp8Max), unbounded)),
                                             _mm256_set1_epi32(static_cast<int>(kFp8Nan)));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  const __m256i half = _mm256_set1_epi32(static_cast<int>(kFp8Half - kFp8Bias));
  const __m256i normal =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(magnitude, odd), half), 20);
  const __m256i smallest = _mm256_set1_epi32(static_cast<int>(kFp8SmallestNormal));
  const __m256i denormals = _mm256_set1_epi32(static_cast<int>(kFp8Denormals));
  const __m256i shifted = _mm256_castps_si256(
      _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(denormals)));
  const __m256i denormal = _mm256_sub_epi32(shifted, denormals);
  const __m256i is_denormal = _mm256_cmpgt_epi32(smallest, magnitude);
  const __m256i code = _mm256_blendv_epi8(normal, denormal, is_denormal);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  return low_bytes(_mm256_or_si256(code, sign));
}

inline __m128i int8_of(Vec v) {
  const __m256i ordered = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q));
  const Vec clamped = min(splat(127), max(splat(-128), v));
  const __m256i lanes = _mm256_and_si256(_mm256_cvtps_epi32(clamped), ordered);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  return _mm_packs_epi16(words, words);
}

inline void store_bytes(void* p, __m128i bytes, Full) {
  _mm_storel_epi64(static_cast<__m128i*>(p), bytes);
}

inline void store_bytes(void* p, __m128i bytes, Tail tail) {
  memcpy(p, &bytes, static_cast<size_t>(tail.count));
}

#else

typedef uint8_t ByteLanes __attribute__((vector_size(4)));

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

inline ByteLanes fp8_of(Vec v) {
  const Bits bits = bits_of(v);
  const Vec unbounded = as_float(bits & splat_bits(0x7fffffff));
  const Bits bounded = bits_of(min(splat(kFp8Max), unbounded));
  const Bits is_nan = reinterpret_cast<Bits>(bounded > splat_bits(kFp8Nan));
  const Bits magnitude = choose(is_nan, splat_bits(kFp8Nan), bounded);
  const Bits odd = (magnitude >> 20) & splat_bits(1);
  const Bits normal = (magnitude + odd + splat_bits(kFp8Half - kFp8Bias)) >> 20;
  const Bits shifted = bits_of(as_float(magnitude) + as_float(splat_bits(kFp8Denormals)));
  const Bits denormal = shifted - splat_bits(kFp8Denormals);
  const Bits is_denormal = reinterpret_cast<Bits>(magnitude < splat_bits(kFp8SmallestNormal));
  const Bits code = choose(is_denormal, denormal, normal);
  return __builtin_convertvector(code | ((bits >> 24) & splat_bits(0x80)), ByteLanes);
}

inline ByteLanes int8_of(Vec v) {
  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
  const Bits rounded = bits_of(min(splat(127), max(splat(-128), v)) + splat(0x1.8p23f));
  const Bits ordered = reinterpret_cast<Bits>(v == v);
  return __builtin_convertvector(rounded & ordered & splat_bits(0xff), ByteLanes);
}

inline void store_bytes(void* p, ByteLanes bytes, Full) { memcpy(p, &bytes, sizeof(bytes)); }

inline void store_bytes(void* p, ByteLanes bytes, Tail tail) {
  memcpy(p, &bytes, static_cast<size_t>(tail.count));
}

#endif

#if defined(__FMA__)
// The quotient correctly rounded by one step of correction, which loses the sign of -0: cheaper
// than a division. Where the remainder is too small to be exact, the code is 0 anyway.
inline Vec quotient(Vec v, Vec divisor, Vec reciprocal) {
  const Vec estimate = mul(v, reciprocal);
  const Vec remainder = fma(estimate, sub(splat(-0.0f), divisor), v);
  return with_sign(fma(remainder, reciprocal, estimate), v);
}
#else
inline Vec quotient(Vec v, Vec divisor, Vec) { return div(v, divisor); }
#endif

template <class Part>
inline void store_fp8(uint8_t* p, Vec v, Part part) {
  store_bytes(p, fp8_of(v), part);
}

template <class Part>
inline void store_int8(int8_t* p, Vec v, Part part) {
  store_bytes(p, int8_of(v), part);
}

}  // namespace
