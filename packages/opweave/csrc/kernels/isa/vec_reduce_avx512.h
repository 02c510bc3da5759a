// Reductions over lanes with AVX-512; see vec_reduce.h.
#pragma once

#include "../vec.h"

namespace {

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

}  // namespace
