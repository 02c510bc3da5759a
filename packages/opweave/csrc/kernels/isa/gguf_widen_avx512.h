// Widening of the units of GGUF blocks with AVX-512; see gguf_blocks.h.
#pragma once

#include "kernels/gguf_blocks.h"

#define OPWEAVE_WIDENS_UNITS

namespace {

// Whether the numbers of a format have four bits.
template <class F>
constexpr bool kHasFourBits = false;
template <>
constexpr bool kHasFourBits<Q4_0> = true;
template <>
constexpr bool kHasFourBits<Q4_1> = true;
template <>
constexpr bool kHasFourBits<Q4_K> = true;

template <class F>
OPWEAVE_INLINE Vec weights_of(Vec numbers, float scale, const float* offset) {
  const Vec products = mul(numbers, splat(scale));
  if constexpr (F::kHasOffsets) return add(products, splat(*offset));
  return products;
}

// Write the weights of a unit, rounded as the definition rounds. `offset` is null without one.
template <class F, class T>
OPWEAVE_INLINE void widen_unit(T* to, const Unit& unit, const float* scales, const float* offset) {
  OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) {
    const __m256i half = _mm512_extracti64x4_epi64(unit[0], i);
    const Vec numbers = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(half));
    const float scale = scales[i * F::kScales / 2];
    Lanes<T>::store(to + i * kLanes, weights_of<F>(numbers, scale, offset), Full{});
  }
}

// Four bits stand for 16 weights, which one instruction looks up for the whole unit. It reads the
// lowest bits of the numbers, so 8 to 15 are the places of -8 to -1 as well.
template <class F>
OPWEAVE_INLINE void look_up_unit(BFloat16* to, const Unit& unit, float scale, const float* offset) {
  const Vec numbers =
      F::kHasOffsets ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                     : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  const __m256i weights = narrow(weights_of<F>(numbers, scale, offset), BFloat16{});
  const __m512i found = _mm512_permutexvar_epi16(unit[0], _mm512_broadcast_i64x4(weights));
  _mm512_storeu_si512(to, found);
}

template <class F>
OPWEAVE_INLINE void widen_unit(BFloat16* to, const Unit& unit, const float* scales,
                               const float* offset) {
  if constexpr (kHasFourBits<F>) {
    look_up_unit<F>(to, unit, *scales, offset);
  } else {
    widen_unit<F, BFloat16>(to, unit, scales, offset);
  }
}

}  // namespace
