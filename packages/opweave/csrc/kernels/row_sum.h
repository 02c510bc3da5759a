// Sums over a row.
//
// Four accumulators hide the latency of the addition. They are combined in a fixed order, so the
// result depends only on the row.
#pragma once

#include "kernels/vec_group.h"

namespace {

// Sum a row. group_at(i) returns the group of T at element i; value(i, part) returns the remaining
// vectors, with zeros past the end. accumulate(v, total) adds a vector to a running total.
template <class T, class GroupAt, class Value, class Accumulate>
inline float sum_over(int64_t n, GroupAt group_at, Value value, Accumulate accumulate) {
  constexpr int kVecs = Group<T>::kVecs;
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    announce<4 * kLanes>(value, i);
    for (int k = 0; k < 4; k += kVecs) {
      const Group<T> group = group_at(i + k * kLanes);
      for (int g = 0; g < kVecs; ++g) sums[k + g] = accumulate(group.v[g], sums[k + g]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) sums[0] = accumulate(value(i, Full{}), sums[0]);
  if (i < n) sums[1] = accumulate(value(i, Tail{n - i}), sums[1]);
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline Vec accumulate_square(Vec v, Vec total) { return fma(v, v, total); }

template <class T, class Value>
inline float sum_of_values(int64_t n, Value value) {
  return sum_over<T>(
      n, [=](int64_t i) { return group_of<T>(i, value); }, value,
      [](Vec v, Vec total) { return add(v, total); });
}

template <class T, class Value>
inline float sum_of_squares(int64_t n, Value value) {
  return sum_over<T>(
      n, [=](int64_t i) { return group_of<T>(i, value); }, value, accumulate_square);
}

}  // namespace
