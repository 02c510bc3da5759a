// Lanes 2i and 2i + 1 of a vector as a pair.
#pragma once

#include "kernels/vec.h"

namespace {

// Swap the lanes of every pair.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline Vec swap_pairs(Vec v) { return _mm512_permute_ps(v, 0xb1); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline Vec swap_pairs(Vec v) { return _mm256_permute_ps(v, 0xb1); }
#else
inline Vec swap_pairs(Vec v) { return Vec{v[1], v[0], v[3], v[2]}; }
#endif

}  // namespace
