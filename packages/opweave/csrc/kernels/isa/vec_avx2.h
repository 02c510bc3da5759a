// 8 float32 lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace {

using Vec = __m256;
constexpr int64_t kLanes = 8;

inline Vec splat(float value) { return _mm256_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline float sum(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}

inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec negative_abs(Vec a) { return _mm256_or_ps(a, splat(-0.0f)); }
inline Vec with_sign(Vec a, Vec b) {
  const Vec sign = splat(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(sign, a), _mm256_and_ps(sign, b));
}
inline Vec less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Vec at_most(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
inline Vec select(Vec condition, Vec a, Vec b) { return _mm256_blendv_ps(b, a, condition); }
inline Vec ratio(Vec a, Vec b) { return div(a, b); }

// In two steps, because 2^n may not be a normal number.
inline Vec scale_by_power(Vec a, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const auto power = [=](__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, bias), 23));
  };
  return mul(mul(a, power(half)), power(_mm256_sub_epi32(whole, half)));
}

inline Vec power_of_bits(Vec v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23));
}

inline __m256i mask_of(Tail tail) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(tail.count)), lane);
}

inline Vec keep(Vec v, Full) { return v; }
inline Vec keep(Vec v, Even) { return v; }
inline Vec keep(Vec v, Odd) { return v; }
inline Vec keep(Vec v, Tail tail) { return _mm256_and_ps(v, _mm256_castsi256_ps(mask_of(tail))); }

// A broadcast load copies the half into both lanes, and one shuffle moves the words into place.
inline Vec widen(__m128i half, BFloat16) {
  const __m256i to_upper =
      _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                       -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), to_upper));
}

inline Vec widen(__m128i half, Float16) { return _mm256_cvtph_ps(half); }

inline __m256i rounding_bias(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
}

// Return the bfloat16 nearest to v, in the upper half of each lane. A NaN is truncated instead: it
// is quiet after arithmetic, and a quiet NaN survives truncation.
inline __m256i rounded_any_bits(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i ordered = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q));
  return _mm256_add_epi32(bits, _mm256_and_si256(rounding_bias(bits), ordered));
}

inline __m128i narrow(Vec v, BFloat16) {
  const __m256i high = _mm256_srli_epi32(rounded_any_bits(v), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

inline Vec upper_half(__m256i bits) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(bits, upper));
}

// Each bfloat16 of a pair is the upper half of a float32, after a shift or mask.
inline Vec even_of(__m256i pairs, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
inline Vec odd_of(__m256i pairs, BFloat16) { return upper_half(pairs); }

inline Vec round_any_to(Vec v, BFloat16) { return upper_half(rounded_any_bits(v)); }

// Like rounded_any_bits, without the check for NaN: a NaN with a zero lower half, the only kind
// that arithmetic with 16-bit numbers produces, does not change.
inline __m256i rounded_bits(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  return _mm256_add_epi32(bits, rounding_bias(bits));
}

inline Vec round_to(Vec v, BFloat16) { return upper_half(rounded_bits(v)); }

inline Vec round_inexact_to(Vec v, BFloat16) {
  return upper_half(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(0x8000)));
}

// Rounds by computing 2^16 v - (2^16 v - v); the inner difference rounds to the target precision.
inline Vec round_moderate_to(Vec v, BFloat16) {
  const Vec power = splat(0x1p16f);
  return _mm256_fmsub_ps(v, power, _mm256_fmsub_ps(v, power, v));
}

inline __m256i joined(__m256i even, __m256i odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
}
inline __m256i any_pairs_of(Vec even, Vec odd) {
  return joined(rounded_any_bits(even), rounded_any_bits(odd));
}
inline __m256i pairs_of(Vec even, Vec odd) {
  return joined(rounded_bits(even), rounded_bits(odd));
}

inline __m128i narrow(Vec v, Float16) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vec round_to(Vec v, Float16) { return widen(narrow(v, Float16{}), Float16{}); }
inline Vec round_any_to(Vec v, Float16) { return round_to(v, Float16{}); }
inline Vec round_inexact_to(Vec v, Float16) { return round_to(v, Float16{}); }
inline Vec round_moderate_to(Vec v, Float16) { return round_to(v, Float16{}); }

inline __m256i load_words(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_words(void* p, __m256i words) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), words);
}

// Return the elements of two vectors that kSelect selects in each half of both, in order.
template <int kSelect>
inline Vec shuffled(Vec a, Vec b) {
  const __m256d halves = _mm256_castps_pd(_mm256_shuffle_ps(a, b, kSelect));
  return _mm256_castpd_ps(_mm256_permute4x64_pd(halves, 0xd8));
}

template <class T>
struct Lanes {  // a 16-bit type; AVX2 has no masked access for these, so tails use a buffer
  static Vec load(const T* p, Full) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
  }
  static Vec load(const T* p, Tail tail) {
    T buffer[kLanes] = {};
    memcpy(buffer, p, static_cast<size_t>(tail.count) * sizeof(T));
    return load(buffer, Full{});
  }
  static Vec load(const T* p, Even) { return even_of(load_words(p), T{}); }
  static Vec load(const T* p, Odd) { return odd_of(load_words(p), T{}); }
  static void store(T* p, Vec v, Full) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v, T{}));
  }
  static void store(T* p, Vec v, Tail tail) {
    T buffer[kLanes];
    store(buffer, v, Full{});
    memcpy(p, buffer, static_cast<size_t>(tail.count) * sizeof(T));
  }
  static Vec round(Vec v) { return round_to(v, T{}); }
  static Vec round_any(Vec v) { return round_any_to(v, T{}); }
  static Vec round_inexact(Vec v) { return round_inexact_to(v, T{}); }
  static Vec round_moderate(Vec v) { return round_moderate_to(v, T{}); }
  static Vec stored(Vec v) { return round_any(v); }
};

template <>
struct Lanes<float> {
  static Vec load(const float* p, Full) { return _mm256_loadu_ps(p); }
  static Vec load(const float* p, Tail tail) {
    touch(p, tail);
    return _mm256_maskload_ps(p, mask_of(tail));
  }
  static Vec load(const float* p, Even) {
    return shuffled<0x88>(load(p, Full{}), load(p + kLanes, Full{}));
  }
  static Vec load(const float* p, Odd) {
    return shuffled<0xdd>(load(p, Full{}), load(p + kLanes, Full{}));
  }
  static void store(float* p, Vec v, Full) { _mm256_storeu_ps(p, v); }
  static void store(float* p, Vec v, Tail tail) {
    touch(p, tail);
    _mm256_maskstore_ps(p, mask_of(tail), v);
  }
  static Vec round(Vec v) { return v; }
  static Vec round_any(Vec v) { return v; }
  static Vec round_inexact(Vec v) { return v; }
  static Vec round_moderate(Vec v) { return v; }
  static Vec stored(Vec v) { return v; }
};

constexpr int kSumOrder[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};

inline Vec sums(const Vec (&v)[kLanes]) {
  // Each step adds the halves of two vectors with one shuffle; a horizontal addition needs two.
  const auto pair = [](Vec a, Vec b) {
    return add(_mm256_blend_ps(a, b, 0xaa), _mm256_permute_ps(_mm256_blend_ps(b, a, 0xaa), 0xb1));
  };
  const auto quad = [=](const Vec* a) {
    const Vec low = pair(a[0], a[1]);
    const Vec high = pair(a[2], a[3]);
    return add(_mm256_blend_ps(low, high, 0xcc), _mm256_shuffle_ps(low, high, 0x4e));
  };
  const Vec low = quad(v);
  const Vec high = quad(v + 4);
  return add(_mm256_blend_ps(low, high, 0xf0), _mm256_permute2f128_ps(low, high, 0x21));
}

inline void store_sums(float* to, const Vec (&v)[4]) {
  __m128 halves[4];
  for (int k = 0; k < 4; ++k) {
    halves[k] = _mm_add_ps(_mm256_castps256_ps128(v[k]), _mm256_extractf128_ps(v[k], 1));
  }
  const auto quarters = [](__m128 a, __m128 b) {
    return _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  };
  const __m128 low = quarters(halves[0], halves[1]);
  const __m128 high = quarters(halves[2], halves[3]);
  _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
}

inline float largest(Vec v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
  return _mm_cvtss_f32(m);
}

inline void transpose(Vec (&v)[kLanes]) {
  Vec pairs[kLanes];
  OPWEAVE_UNROLL for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  Vec quads[kLanes];
  OPWEAVE_UNROLL for (int i = 0; i < kLanes; i += 4) {
    OPWEAVE_UNROLL for (int k = 0; k < 2; ++k) {
      quads[i + 2 * k] = _mm256_shuffle_ps(pairs[i + k], pairs[i + k + 2], 0x44);
      quads[i + 2 * k + 1] = _mm256_shuffle_ps(pairs[i + k], pairs[i + k + 2], 0xee);
    }
  }
  OPWEAVE_UNROLL for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

}  // namespace
