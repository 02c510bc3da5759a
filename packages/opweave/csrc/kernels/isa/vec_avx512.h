// 16 float32 lanes: AVX-512 (F, BW, VL, DQ), with the bfloat16 conversion instruction if present.
#pragma once

#include <immintrin.h>

namespace {

using Vec = __m512;
constexpr int64_t kLanes = 16;

inline Vec splat(float value) { return _mm512_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }

inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec negative_abs(Vec a) { return _mm512_or_ps(a, splat(-0.0f)); }
inline Vec with_sign(Vec a, Vec b) {
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
  // 0xca: sign ? b : a, bit by bit.
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, _mm512_castps_si512(b),
                                                       _mm512_castps_si512(a), 0xca));
}
inline __mmask16 less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline __mmask16 at_most(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline Vec select(__mmask16 condition, Vec a, Vec b) {
  return _mm512_mask_blend_ps(condition, b, a);
}

// Whether to divide. An estimate and one step of Newton's method take a third of the time of a
// division, except on Zen, whose divider runs in parallel with other instructions. This depends on
// the instruction set instead of the tuning, because it changes results: most CPUs with
// AVX512-BF16, but without AMX, are Zen.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kDivides = true;
#else
constexpr bool kDivides = false;
#endif

inline Vec ratio(Vec a, Vec b) {
  if constexpr (kDivides) return div(a, b);
  const Vec estimate = _mm512_rcp14_ps(b);
  // For infinity, the step is NaN, which min replaces with 1; the estimate 0 is then the result.
  const Vec step = min(_mm512_fnmadd_ps(b, estimate, splat(1)), splat(1));
  return mul(a, fma(step, estimate, estimate));
}

inline Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline Vec power_of_bits(Vec v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23));
}

// The scale instruction takes the floor of its argument, so the fraction is relative to the floor.
struct Exponent {
  static constexpr float kPolynomial[] = {1.0000026f, 0.69300383f, 0.24144275f, 0.05201146f,
                                          0.013534168f};

  explicit Exponent(Vec x)
      : fraction(_mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)), power(x) {}
  Vec raise(Vec p) const { return scale_by_power(p, power); }

  Vec fraction;
  Vec power;
};

inline __mmask16 mask_of(Tail tail) { return static_cast<__mmask16>((1u << tail.count) - 1u); }

inline Vec keep(Vec v, Full) { return v; }
inline Vec keep(Vec v, Even) { return v; }
inline Vec keep(Vec v, Odd) { return v; }
inline Vec keep(Vec v, Tail tail) { return _mm512_maskz_mov_ps(mask_of(tail), v); }

inline Vec widen(__m256i half, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline Vec widen(__m256i half, Float16) { return _mm512_cvtph_ps(half); }

// Return the bfloat16 nearest to v, in the upper half of each lane. A NaN is truncated instead: it
// is quiet after arithmetic, and a quiet NaN survives truncation.
inline __m512i rounded_any_bits(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(bits, _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), bits, bias);
}

inline Vec upper_half(__m512i bits) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(bits, upper));
}

inline __m256i upper_words(__m512i bits) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

// Each bfloat16 of a pair is the upper half of a float32, after a shift or mask.
inline Vec even_of(__m512i pairs, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
inline Vec odd_of(__m512i pairs, BFloat16) { return upper_half(pairs); }

inline Vec round_any_to(Vec v, BFloat16) { return upper_half(rounded_any_bits(v)); }

// Like rounded_any_bits, without the check for NaN: a NaN with a zero lower half, the only kind
// that arithmetic with 16-bit numbers produces, does not change.
inline __m512i rounded_bits(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i below = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(below, odd, below, _mm512_set1_epi32(1));
}

inline Vec round_to(Vec v, BFloat16) { return upper_half(rounded_bits(v)); }

inline Vec round_inexact_to(Vec v, BFloat16) {
  return upper_half(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000)));
}

// Rounds by computing 2^16 v - (2^16 v - v); the inner difference rounds to the target precision.
inline Vec round_moderate_to(Vec v, BFloat16) {
  const Vec power = splat(0x1p16f);
  return _mm512_fmsub_ps(v, power, _mm512_fmsub_ps(v, power, v));
}

#if defined(__AVX512BF16__)
// Rounds to nearest even and preserves NaN, but flushes denormals (below 1.2e-38) to zero. This is
// acceptable for results; intermediate values, which a large factor may follow, use round_to.
inline __m256i narrow(Vec v, BFloat16) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline Vec stored_as(Vec v, BFloat16) { return widen(narrow(v, BFloat16{}), BFloat16{}); }

inline __m512i any_pairs_of(Vec even, Vec odd) {
  const __m512i in_turn =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}
inline __m512i pairs_of(Vec even, Vec odd) { return any_pairs_of(even, odd); }
#else
inline __m256i narrow(Vec v, BFloat16) {
  return upper_words(rounded_any_bits(v));
}
inline Vec stored_as(Vec v, BFloat16) { return round_any_to(v, BFloat16{}); }

inline __m512i joined(__m512i even, __m512i odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}
inline __m512i any_pairs_of(Vec even, Vec odd) {
  return joined(rounded_any_bits(even), rounded_any_bits(odd));
}
inline __m512i pairs_of(Vec even, Vec odd) {
  return joined(rounded_bits(even), rounded_bits(odd));
}
#endif

inline __m256i narrow(Vec v, Float16) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vec round_to(Vec v, Float16) { return widen(narrow(v, Float16{}), Float16{}); }
inline Vec round_any_to(Vec v, Float16) { return round_to(v, Float16{}); }
inline Vec round_inexact_to(Vec v, Float16) { return round_to(v, Float16{}); }
inline Vec round_moderate_to(Vec v, Float16) { return round_to(v, Float16{}); }
inline Vec stored_as(Vec v, Float16) { return round_to(v, Float16{}); }

// Return 7-bit bytes combined with the sign bits of other bytes.
inline __m512i with_signs(__m512i bytes, __m512i signs) {
  // 0xf8: bytes | (signs & 0x80), bit by bit.
  return _mm512_ternarylogic_epi32(bytes, signs, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
}

// Restore the order after packing two vectors, which interleaves them by eight bytes.
inline __m512i one_after_the_other(__m512i packed) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

inline __m512i load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, __m512i words) { _mm512_storeu_si512(p, words); }

template <class T>
struct Lanes {  // a 16-bit storage type
  static Vec load(const T* p, Full) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
  }
  static Vec load(const T* p, Tail tail) {
    touch(p, tail);
    return widen(_mm256_maskz_loadu_epi16(mask_of(tail), p), T{});
  }
  static Vec load(const T* p, Even) { return even_of(load_words(p), T{}); }
  static Vec load(const T* p, Odd) { return odd_of(load_words(p), T{}); }
  static void store(T* p, Vec v, Full) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v, T{}));
  }
  static void store(T* p, Vec v, Tail tail) {
    touch(p, tail);
    _mm256_mask_storeu_epi16(p, mask_of(tail), narrow(v, T{}));
  }
  static Vec round(Vec v) { return round_to(v, T{}); }
  static Vec round_any(Vec v) { return round_any_to(v, T{}); }
  static Vec round_inexact(Vec v) { return round_inexact_to(v, T{}); }
  static Vec round_moderate(Vec v) { return round_moderate_to(v, T{}); }
  static Vec stored(Vec v) { return stored_as(v, T{}); }
};

template <>
struct Lanes<float> {
  static Vec load(const float* p, Full) { return _mm512_loadu_ps(p); }
  static Vec load(const float* p, Tail tail) {
    touch(p, tail);
    return _mm512_maskz_loadu_ps(mask_of(tail), p);
  }
  static Vec load(const float* p, Even) { return every_second(p, 0); }
  static Vec load(const float* p, Odd) { return every_second(p, 1); }
  static void store(float* p, Vec v, Full) { _mm512_storeu_ps(p, v); }
  static void store(float* p, Vec v, Tail tail) {
    touch(p, tail);
    _mm512_mask_storeu_ps(p, mask_of(tail), v);
  }
  static Vec round(Vec v) { return v; }
  static Vec round_any(Vec v) { return v; }
  static Vec round_inexact(Vec v) { return v; }
  static Vec round_moderate(Vec v) { return v; }
  static Vec stored(Vec v) { return v; }

 private:
  static Vec every_second(const float* p, int first) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i places = _mm512_add_epi32(even, _mm512_set1_epi32(first));
    return _mm512_permutex2var_ps(load(p, Full{}), places, load(p + kLanes, Full{}));
  }
};

constexpr int kSumOrder[kLanes] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};

inline Vec sums(const Vec (&v)[kLanes]) {
  Vec quads[4];  // in each quarter of the lanes: four vectors' sums over that quarter
  for (int i = 0; i < 4; ++i) {
    const Vec* a = v + 4 * i;
    const Vec low = add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const Vec high = add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    quads[i] = add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  }
  const auto fold = [](Vec a, Vec b) {  // quarters 0 + 1 and 2 + 3 of a, then of b
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

inline void store_sums(float* to, const Vec (&v)[4]) {
  const auto halves = [](Vec a, Vec b) {  // of a, then of b
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const Vec low = halves(v[0], v[1]);
  const Vec high = halves(v[2], v[3]);
  // One quarter per vector.
  Vec sums = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  sums = add(sums, _mm512_permute_ps(sums, 0x4e));
  sums = add(sums, _mm512_permute_ps(sums, 0xb1));
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}

inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }

inline void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  __m512i quads[16];  // in quarter l of quads[i + j]: column 4 * l + j of rows i to i + 3
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}

inline void transpose(Vec (&v)[kLanes]) {
  __m512i rows[kLanes];
  OPWEAVE_UNROLL for (int i = 0; i < kLanes; ++i) rows[i] = _mm512_castps_si512(v[i]);
  transpose(rows);
  OPWEAVE_UNROLL for (int i = 0; i < kLanes; ++i) v[i] = _mm512_castsi512_ps(rows[i]);
}

}  // namespace
