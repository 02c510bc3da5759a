// Reductions over lanes:
//   sums     lane i is the sum over the lanes of v[i], added in one order for every i
//   kSumOrder  that order: entries 0 and 1 are added, 2 and 3, and so on, then the sums likewise
//   store_sums  the sum of each of four vectors, bitwise equal to sum
//   largest  the largest lane; unspecified if some lanes are NaN
#pragma once

#include "kernels/vec.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

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

#else

constexpr int kSumOrder[kLanes] = {0, 2, 1, 3};

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
