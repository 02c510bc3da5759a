// transpose with AVX2; see vec_transpose.h.
#pragma once

#include "kernels/vec.h"

namespace {

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
