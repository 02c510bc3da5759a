// The sum of a row's values.
#pragma once

#include "kernels/vec.h"

namespace {

// value(i, part) gives the vector at element i, zero past the end. Four accumulators hide the
// latency of the addition, and their fixed order makes a row's result independent of everything
// but the row.
template <class Value>
inline float sum_of_values(int64_t n, Value value) {
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) sums[k] = add(value(i + k * kLanes, Full{}), sums[k]);
  }
  for (; i + kLanes <= n; i += kLanes) sums[0] = add(value(i, Full{}), sums[0]);
  if (i < n) sums[1] = add(value(i, Tail{n - i}), sums[1]);
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

}  // namespace
