// Reductions over lanes:
//   sums     lane i is the sum over the lanes of v[i], added in one order for every i
//   store_sums  the same of four vectors, which are stored
//   largest  the largest lane; of several NaN and numbers, which one is unspecified
#pragma once

#include "kernels/vec.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

// In each quarter of the lanes: four vectors' sums over that quarter.
inline Vec sums_of_quarters(const Vec* a) {
  const Vec low = add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
  const Vec high = add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
  return add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
}

inline Vec sums(const Vec (&v)[kLanes]) {
  Vec quads[4];
  for (int i = 0; i < 4; ++i) quads[i] = sums_of_quarters(v + 4 * i);
  const auto fold = [](Vec a, Vec b) {  // quarters 0 + 1 and 2 + 3 of a, then of b
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

inline void store_sums(float* to, const Vec (&v)[4]) {
  const Vec quarters = sums_of_quarters(v);
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// In each half of the lanes: four vectors' sums over that half. Each step adds the halves of two
// vectors: those that are in place already, and the others, which one shuffle brings there. A
// horizontal addition takes two.
inline Vec sums_of_halves(const Vec* a) {
  const auto pair = [](Vec a, Vec b) {
    return add(_mm256_blend_ps(a, b, 0xaa), _mm256_permute_ps(_mm256_blend_ps(b, a, 0xaa), 0xb1));
  };
  const Vec low = pair(a[0], a[1]);
  const Vec high = pair(a[2], a[3]);
  return add(_mm256_blend_ps(low, high, 0xcc), _mm256_shuffle_ps(low, high, 0x4e));
}

inline Vec sums(const Vec (&v)[kLanes]) {
  const Vec low = sums_of_halves(v);
  const Vec high = sums_of_halves(v + 4);
  return add(_mm256_blend_ps(low, high, 0xf0), _mm256_permute2f128_ps(low, high, 0x21));
}

inline void store_sums(float* to, const Vec (&v)[4]) {
  const Vec halves = sums_of_halves(v);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

inline float largest(Vec v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
  return _mm_cvtss_f32(m);
}

#else

inline Vec sums(const Vec (&v)[kLanes]) {
  return Vec{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])};
}

inline void store_sums(float* to, const Vec (&v)[4]) {
  for (int k = 0; k < 4; ++k) to[k] = sum(v[k]);
}

inline float largest(Vec v) {
  const float a = v[0] > v[1] ? v[0] : v[1];
  const float b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

#endif

}  // namespace
