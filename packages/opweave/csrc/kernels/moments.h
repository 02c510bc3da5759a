// The mean and variance of a row.
//
// The variance needs a second pass: computing it as E[x^2] - E[x]^2 could cancel all digits.
#pragma once

#include "kernels/prefetch.h"
#include "kernels/row_sum.h"

namespace {

template <class T, class Ahead = Next<>>
inline float mean_of(const T* x, int64_t n, Ahead next = {}) {
  const float total = sum_of_values<T>(n, paced(Loaded<T>{x}, next));
  return total / static_cast<float>(n);
}

// Return the mean square of change(x) - center, where change is a function of vectors.
template <class T, class Change, class Ahead = Next<>>
inline float mean_square(const T* x, int64_t n, float center, Change change, Ahead next = {}) {
  const Vec centers = splat(center);
  const auto distance = [=](int64_t i, auto part) {
    return keep(sub(change(Lanes<T>::load(x + i, part)), centers), part);
  };
  const float squares = sum_of_squares<T>(n, paced(distance, next));
  return squares / static_cast<float>(n);
}

template <class T, class Ahead = Next<>>
inline float variance_of(const T* x, int64_t n, float mean, Ahead next = {}) {
  return mean_square(x, n, mean, [](Vec v) { return v; }, next);
}

// Return the standard deviation, even if the variance would overflow.
template <class T>
inline float deviation_of(const T* x, int64_t n, float mean) {
  const float variance = variance_of(x, n, mean);
  if (variance < __builtin_inff()) return __builtin_sqrtf(variance);
  constexpr float kDown = 0x1p-80f;
  const Vec down = splat(kDown);
  const float scaled = mean_square(x, n, mean * kDown, [=](Vec v) { return mul(v, down); });
  return __builtin_sqrtf(scaled) / kDown;
}

}  // namespace
