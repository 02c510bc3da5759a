// Widening of 4-bit weights with AVX-512: a group has 16 different weights, which one instruction
// looks up.
#pragma once

#include "kernels/low_bit_weights.h"

#define OPWEAVE_LOOKS_UP_WEIGHTS

namespace {

// The weights that 0 to 15 stand for in a group, rounded like each_piece rounds.
inline Vec weights_of_group(float scale, const float* offset) {
  const Vec q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  if (offset == nullptr) return mul(add(q, splat(-8)), splat(scale));
  return add(mul(q, splat(scale)), splat(*offset));
}

// Store the weights of 32 columns; instructions look at the lowest bits of each element of an index
// only.
inline void store_weights(float* to, const uint8_t* q, Vec weights) {
  const __m512i packed =
      _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) {
    const __m512i places = _mm512_add_epi32(first, _mm512_set1_epi32(2 * i));
    const __m512i index = _mm512_srlv_epi32(_mm512_permutexvar_epi32(places, packed), shifts);
    _mm512_storeu_ps(to + i * kLanes, _mm512_permutexvar_ps(index, weights));
  }
}

inline void store_weights(BFloat16* to, const uint8_t* q, Vec weights) {
  const __m512i packed =
      _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  const __m512i fours = _mm512_set1_epi64(0x000c000800040000);
  const __m512i places = _mm512_set_epi16(7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3,
                                          2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  const __m512i index = _mm512_srlv_epi16(_mm512_permutexvar_epi16(places, packed), fours);
  const __m512i twice = _mm512_broadcast_i64x4(narrow(weights, BFloat16{}));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, twice));
}

constexpr int64_t kStored = 32;

// Widen columns of a row, from a multiple of kStored on; groups are multiples of kStored columns.
template <class T>
inline void look_up_columns(T* to, const OpweaveWeightW4& weight, int64_t row, int64_t column,
                            int64_t end) {
  float scales[kScales];
  float offsets[kScales];
  const uint8_t* q = weight.q + row * weight.q_stride + column / 2;
  const int64_t groups = (end - 1) / weight.group + 1;
  const bool has_offsets = weight.offset != nullptr;
  for (int64_t first = column / weight.group; first < groups; first += kScales) {
    const int64_t count = groups - first < kScales ? groups - first : kScales;
    load_scales(scales, weight, row, first, count);
    if (has_offsets) load_offsets(offsets, weight, row, first, count);
    for (int64_t g = 0; g < count; ++g) {
      const Vec weights = weights_of_group(scales[g], has_offsets ? offsets + g : nullptr);
      const int64_t next = (first + g + 1) * weight.group;
      const int64_t stop = next < end ? next : end;
      for (; column < stop; column += kStored, to += kStored, q += kStored / 2) {
        store_weights(to, q, weights);
      }
    }
  }
}

}  // namespace
