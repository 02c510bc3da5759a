// transpose: lane i of vector k becomes lane k of vector i. With AVX-512, also for integers.
#pragma once

#include "kernels/vec.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

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

#else

inline void transpose(Vec (&v)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    for (int k = 0; k < i; ++k) {
      const float lane = v[i][k];
      v[i][k] = v[k][i];
      v[k][i] = lane;
    }
  }
}

#endif

}  // namespace
