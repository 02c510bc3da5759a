// Sums over a row.
//
// value(i, part) gives the vector at element i, zero past the end. Four accumulators hide the
// latency of the addition, and their fixed order makes a row's result independent of everything
// but the row.
#pragma once

#include "kernels/vec.h"

namespace {

// accumulate(v, total) adds a vector to a running total.
template <class Value, class Accumulate>
inline float sum_over(int64_t n, Value value, Accumulate accumulate) {
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) sums[k] = accumulate(value(i + k * kLanes, Full{}), sums[k]);
  }
  for (; i + kLanes <= n; i += kLanes) sums[0] = accumulate(value(i, Full{}), sums[0]);
  if (i < n) sums[1] = accumulate(value(i, Tail{n - i}), sums[1]);
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <class Value>
inline float sum_of_values(int64_t n, Value value) {
  return sum_over(n, value, [](Vec v, Vec total) { return add(v, total); });
}

template <class Value>
inline float sum_of_squares(int64_t n, Value value) {
  return sum_over(n, value, [](Vec v, Vec total) { return fma(v, v, total); });
}

}  // namespace
