// The vector operations of quantization, for every instruction set of vec.h:
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

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/vec_quant_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/isa/vec_quant_avx2.h"
#else
#include "kernels/isa/vec_quant_generic.h"
#endif

namespace {

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
