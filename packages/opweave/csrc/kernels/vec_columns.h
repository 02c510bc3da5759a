// The column order that results from unpacking two rows of bfloat16 into pairs with AVX-512.
#pragma once

#include "kernels/vec.h"

namespace {

constexpr int64_t kPairedColumns = 32;

inline int64_t padded_columns(int64_t size) {
  return (size + kPairedColumns - 1) / kPairedColumns * kPairedColumns;
}

#if defined(__AVX512BF16__)

// The pairs of two rows of 32 columns form two vectors: `low` contains columns 0 to 3, 8 to 11, 16
// to 19 and 24 to 27, `high` contains the others. Outputs are accumulated in this order.
struct PairedColumns {
  Vec low;
  Vec high;
};

inline PairedColumns split(Vec first, Vec second) {
  return {_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd)};
}

inline void join_columns(float* row, int64_t size) {
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int64_t d = 0; d < size; d += kPairedColumns) {
    const __m512d low = _mm512_castps_pd(Lanes<float>::load(row + d, Full{}));
    const __m512d high = _mm512_castps_pd(Lanes<float>::load(row + d + kLanes, Full{}));
    _mm512_storeu_pd(row + d, _mm512_permutex2var_pd(low, first, high));
    _mm512_storeu_pd(row + d + kLanes, _mm512_permutex2var_pd(low, second, high));
  }
}

#endif

}  // namespace
