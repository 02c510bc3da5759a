// Quantize 16-bit numbers to float8_e4m3fn by dividing by a scale, for rows in which no quotient is
// NaN or exceeds the largest code.
//
// As in vec_quant.h, a sum is rounded to the unit of its power of two. Its upper word then contains
// 128 * E, where E is the exponent, and its lower word the number of units. The code is the number
// of units plus 8 for each power of two above 2^-6. A product of words computes
// 16 * (units + 8 * E), and 256 times as much for the neighbor, so that the sum of both contains
// two codes.
#pragma once

#include "kernels/vec_group.h"
#include "kernels/vec_quant.h"

namespace {

// Whether this method supports T.
template <class T>
constexpr bool kHasQuotients = false;

template <class T>
class Fp8Quotients;

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

template <>
constexpr bool kHasQuotients<BFloat16> = true;
template <>
constexpr bool kHasQuotients<Float16> = true;

template <class T>
class Fp8Quotients {
 public:
  explicit Fp8Quotients(float scale) : divisor_(splat(scale)), inverse_(splat(1.0f / scale)) {}

  // Store the codes of the numbers of a row. Returns the number of codes stored, a multiple of 64
  // that is at most n.
  template <class Ahead>
  int64_t store_codes(uint8_t* out, int64_t n, const T* row, Ahead next) const {
    constexpr int64_t kStep = 2 * kWords;
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      next.template fetch_span<kStep>(i);
      const __m512i first = load_words(row + i);
      const __m512i second = load_words(row + i + kWords);
      const __m512i codes = _mm512_packus_epi32(codes_of(first, T{}), codes_of(second, T{}));
      store_bytes(out + i, in_order(codes, _mm512_packs_epi16(first, second), T{}), Full{});
    }
    return i;
  }

 private:
  // Return two codes per lane: those of even_of and odd_of.
  __m512i codes_of(__m512i words, BFloat16) const {
    const __m512i magnitudes = without_signs(words);
    return joined_codes(even_of(magnitudes, BFloat16{}), odd_of(magnitudes, BFloat16{}));
  }
  // Return two codes per lane: those of the first and the second half.
  __m512i codes_of(__m512i words, Float16) const {
    const __m512i magnitudes = without_signs(words);
    return joined_codes(widen(_mm512_castsi512_si256(magnitudes), Float16{}),
                        widen(_mm512_extracti64x4_epi64(magnitudes, 1), Float16{}));
  }

  static __m512i without_signs(__m512i words) {
    return _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
  }

  __m512i joined_codes(Vec first, Vec second) const {
    constexpr int kUnits = 16;
    constexpr int kNext = 256;
    const __m512i ones = words_of(kUnits, 1);
    const __m512i nexts = words_of(kUnits * kNext, kNext);
    const __m512i bias = _mm512_set1_epi32(-kUnits * kFp8Bias * (1 + kNext));
    const __m512i one = _mm512_dpwssd_epi32(bias, rounded(first), ones);
    return _mm512_srli_epi32(_mm512_dpwssd_epi32(one, rounded(second), nexts), 4);
  }

  static __m512i words_of(int low, int high) { return _mm512_set1_epi32(high << 16 | low); }

  __m512i rounded(Vec magnitude) const {
    const Vec v = quotient(magnitude, divisor_, inverse_);
    const __m512i exponent = _mm512_set1_epi32(static_cast<int>(kFp8Powers));
    const Vec power = max(splat(kFp8SmallestNormal),
                          _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), exponent)));
    return _mm512_castps_si512(fma(v, splat(kFp8Unit), power));
  }

  // Return packed codes in order, with signs.
  static __m512i in_order(__m512i codes, __m512i signs, BFloat16) {
    return one_after_the_other(with_signs(codes, signs));
  }
  static __m512i in_order(__m512i codes, __m512i signs, Float16) {
    const __m512i places = _mm512_set_epi8(
        63, 61, 59, 57, 47, 45, 43, 41, 31, 29, 27, 25, 15, 13, 11, 9, 62, 60, 58, 56, 46, 44, 42,
        40, 30, 28, 26, 24, 14, 12, 10, 8, 55, 53, 51, 49, 39, 37, 35, 33, 23, 21, 19, 17, 7, 5, 3,
        1, 54, 52, 50, 48, 38, 36, 34, 32, 22, 20, 18, 16, 6, 4, 2, 0);
    return with_signs(_mm512_permutexvar_epi8(places, codes), one_after_the_other(signs));
  }

  Vec divisor_;
  Vec inverse_;
};

#endif

}  // namespace
