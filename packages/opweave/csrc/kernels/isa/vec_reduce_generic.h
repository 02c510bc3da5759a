// Reductions over lanes with the vector types of GCC and Clang; see vec_reduce.h.
#pragma once

#include "../vec.h"

namespace {

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

}  // namespace
