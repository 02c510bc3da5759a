// Reductions over lanes with AVX2; see vec_reduce.h.
#pragma once

#include "../vec.h"

namespace {

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

}  // namespace
