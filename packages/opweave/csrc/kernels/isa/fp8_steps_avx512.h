// Quantize 16-bit numbers to float8_e4m3fn codes of x * factor, without computing the products.
//
// Rounding the product to a code is a step function of x, and the bits of a magnitude, as an
// integer, have the order of the magnitudes. Between two steps, the code is
// (z + adjustment) >> kShift, where z is that integer minus a constant. kShift maps the 2^kMantissa
// numbers between two powers of two to 8 codes. Two tables of 32 adjustments cover all numbers:
//
//   - Above 7.75 * 2^-9, every power of two has the same 8 steps, with codes increased by 8. A 32nd
//     of a power of two contains at most one step, so the position in the power of two is the index
//     into the table.
//   - Below, the 8 steps are 2^-9 apart, and an eighth of a power of two contains at most one. From
//     0.5 * 2^-9 on, there are fewer than 32 such eighths.
//
// The positions of the steps are computed from the product itself, rounded to float32 as in the
// other kernels, so the codes are bitwise equal.
#pragma once

#include "kernels/vec_group.h"
#include "kernels/vec_quant.h"

namespace {

// Whether this method supports T.
template <class T>
constexpr bool kHasSteps = false;

template <class T>
class Fp8Steps;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

template <class T>
struct StepsFormat;

// No scaling.
struct AsTheyAre {
  explicit AsTheyAre(float) {}
  float scaled(float scale) const { return scale; }
  __m512i scaled(__m512i numbers) const { return numbers; }
};

template <>
struct StepsFormat<BFloat16> : AsTheyAre {
  using AsTheyAre::AsTheyAre;
  static constexpr int kMantissa = 7;
  static constexpr int kInfinity = 0x7f80;

  // Whether all steps, 2^-10 to 448 times the scale, are normal numbers.
  static bool holds(float scale) { return scale > 0x1p-100f && scale < 0x1p100f; }
  static __m256i words_below(Vec v) { return upper_words(_mm512_castps_si512(v)); }
};

struct Float16Steps {
  static constexpr int kMantissa = 10;
  static constexpr int kInfinity = 0x7c00;

  static __m256i words_below(Vec v) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  }
};

#if defined(__AVX512FP16__)

// Scales numbers and scales by a power of two, so that the step to the largest code is below
// float16's infinity, and the first step is a normal number.
template <>
struct StepsFormat<Float16> : Float16Steps {
  static bool holds(float scale) { return scale > 0x1p-18f && scale < 0x1p20f; }

  explicit StepsFormat(float scale) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    const int to_64 = 127 + 6 - static_cast<int>(bits >> 23);
    power = to_64 < 15 ? to_64 : 15;
    factor = _mm512_castsi512_ph(_mm512_set1_epi16(static_cast<int16_t>((15 + power) << 10)));
  }
  float scaled(float scale) const {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits += static_cast<uint32_t>(power) << 23;
    memcpy(&scale, &bits, sizeof bits);
    return scale;
  }
  __m512i scaled(__m512i numbers) const {
    return _mm512_castph_si512(mul(_mm512_castsi512_ph(numbers), factor));
  }

  int power;
  Halves factor;
};

#else

template <>
struct StepsFormat<Float16> : Float16Steps, AsTheyAre {
  using AsTheyAre::AsTheyAre;

  // Whether the step to the largest code is below infinity, and 7.75 * 2^-9 times the scale is a
  // normal number. Smaller steps may be denormal, because denormal numbers are spaced like the
  // smallest normal ones.
  static bool holds(float scale) { return scale > 0x1.2p-8f && scale < 0x1p7f; }
};

#endif

template <>
constexpr bool kHasSteps<BFloat16> = true;
template <>
constexpr bool kHasSteps<Float16> = true;

template <class T>
class Fp8Steps {
 public:
  static bool holds(float scale) { return StepsFormat<T>::holds(scale); }

  explicit Fp8Steps(float scale) : format_(scale) {
    const __m256i numbers = first_numbers(format_.scaled(scale));
    const int below = _mm256_extract_epi16(numbers, 0) - 1;
    zero_ = words(below);
    infinity_ = words(StepsFormat<T>::kInfinity - below);
    const __m512i steps = _mm512_sub_epi16(_mm512_castsi256_si512(numbers), zero_);
    most_ = _mm512_add_epi16(at(steps, 13), words(14 << kMantissa));
    normal_ = _mm512_sub_epi16(at(steps, 15), words(1 << kMantissa));
    few_ = few_adjustments(steps);
    many_ = many_adjustments(steps);
  }

  // Store the codes of the numbers of a row. Returns the number of codes stored, a multiple of 64
  // that is at most n. Without kMayExceed, no product may be NaN or exceed the largest code.
  template <bool kMayExceed, class Ahead>
  int64_t store_codes(uint8_t* out, int64_t n, const T* row, Ahead next) const {
    constexpr int64_t kStep = 2 * kWords;
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      next.template fetch_span<kStep>(i);
      store_bytes(out + i, bytes_of<kMayExceed>(load_words(row + i), load_words(row + i + kWords)),
                  Full{});
    }
    return i;
  }

 private:
  static constexpr int kMantissa = StepsFormat<T>::kMantissa;
  static constexpr int kShift = kMantissa - 3;  // converts numbers to codes
  static constexpr int kPlace = kMantissa - 5;  // converts numbers to 32nds of a power of two

  static __m512i words(int word) { return _mm512_set1_epi16(static_cast<int16_t>(word)); }
  static __m512i at(__m512i steps, int k) { return _mm512_permutexvar_epi16(words(k), steps); }

  // Return the first number whose product has the code, for codes 1 to 16.
  static __m256i first_numbers(float scale) {
    const Vec unit = splat(0x1p-9f);
    const Vec ties = mul(unit, _mm512_setr_ps(0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f, 8.5f,
                                              9.5f, 10.5f, 11.5f, 12.5f, 13.5f, 14.5f, 15.5f));
    // Ties round to the even code, which is the lower one for every second tie.
    const __m512i bits = _mm512_castps_si512(ties);
    const Vec least =
        _mm512_castsi512_ps(_mm512_mask_add_epi32(bits, 0x5555, bits, _mm512_set1_epi32(1)));
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i estimate = StepsFormat<T>::words_below(mul(least, splat(scale)));
    const auto is_below = [&](__m256i numbers) {
      return less(mul(widen(numbers, T{}), splat(1.0f / scale)), least);
    };
    const __mmask16 first_is_below = is_below(estimate);
    const __mmask16 next_is_below = is_below(_mm256_add_epi16(estimate, one));
    const __m256i number = _mm256_mask_add_epi16(estimate, first_is_below, estimate, one);
    return _mm256_mask_add_epi16(number, next_is_below, number, one);
  }

  // Return for each of 32 parts that begin at `begin` the adjustment of its numbers: they get the
  // code of the last of the steps `first` to `last` before its end, or one less below a step inside
  // it.
  static __m512i adjustments(__m512i steps, int first, int last, __m512i begin, int size,
                             __m512i least) {
    const __m512i end = _mm512_add_epi16(begin, words(size - 1));
    __m512i code = words(first);
    for (int k = first; k <= last; ++k) {
      const __mmask32 is_passed = _mm512_cmple_epu16_mask(at(steps, k), end);
      code = _mm512_mask_add_epi16(code, is_passed, code, words(1));
    }
    const __m512i step = _mm512_permutexvar_epi16(_mm512_sub_epi16(code, words(1)), steps);
    return _mm512_sub_epi16(_mm512_slli_epi16(code, kShift),
                            _mm512_max_epu16(_mm512_max_epu16(step, least), begin));
  }

  static __m512i counted() {
    return _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                            13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  }

  __m512i few_adjustments(__m512i steps) const {
    return adjustments(steps, 0, 7, _mm512_slli_epi16(counted(), kShift), 1 << kShift,
                       _mm512_setzero_si512());
  }

  // Return the adjustments from the part that contains `normal_`, the first number of code 8, to
  // the part before it in the next power of two.
  __m512i many_adjustments(__m512i steps) const {
    const __m512i lowest = _mm512_and_si512(normal_, words(-(1 << kPlace)));
    const __m512i past =
        _mm512_and_si512(_mm512_sub_epi16(_mm512_slli_epi16(counted(), kPlace), lowest),
                         words((1 << kMantissa) - 1));
    return adjustments(steps, 8, 14, _mm512_add_epi16(lowest, past), 1 << kPlace, normal_);
  }

  template <bool kMayExceed>
  __m512i codes_of(__m512i numbers) const {
    const __m512i any = _mm512_subs_epu16(_mm512_and_si512(numbers, words(0x7fff)), zero_);
    const __m512i z = kMayExceed ? _mm512_min_epu16(any, most_) : any;
    const __m512i many = _mm512_permutexvar_epi16(_mm512_srli_epi16(z, kPlace), many_);
    const __m512i adjustment = _mm512_mask_permutexvar_epi16(
        many, _mm512_cmplt_epu16_mask(z, normal_), _mm512_srli_epi16(z, kShift), few_);
    const __m512i codes = _mm512_srli_epi16(_mm512_add_epi16(z, adjustment), kShift);
    if constexpr (!kMayExceed) return codes;
    return _mm512_mask_mov_epi16(codes, _mm512_cmpgt_epu16_mask(any, infinity_), words(0x7f));
  }

  template <bool kMayExceed>
  __m512i bytes_of(__m512i first, __m512i second) const {
    first = format_.scaled(first);
    second = format_.scaled(second);
    const __m512i codes =
        _mm512_packus_epi16(codes_of<kMayExceed>(first), codes_of<kMayExceed>(second));
    return one_after_the_other(with_signs(codes, _mm512_packs_epi16(first, second)));
  }

  StepsFormat<T> format_;
  __m512i zero_;      // the last number of code 0
  __m512i infinity_;  // this and the following are relative to zero_
  __m512i most_;      // the first number of the largest code
  __m512i normal_;    // the first number to which many_ applies
  __m512i few_;
  __m512i many_;
};

#endif

}  // namespace
