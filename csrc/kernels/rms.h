// The two passes of RMS normalisation over one row: the sum of squares, then the scaled values.
//
// The rounding is part of the op's definition: normalise in float32, round to the weight's type,
// multiply, round to the weight's type, round to x's type.
#pragma once

#include "kernels/vec.h"

namespace {

// The sum of squares of n values; value(i, part) gives the vector at element i. Four accumulators
// hide the latency of the addition, and their fixed order makes a row's result independent of
// everything but the row.
template <class Value>
inline float sum_of_squares(int64_t n, Value value) {
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      const Vec v = value(i + k * kLanes, Full{});
      sums[k] = fma(v, v, sums[k]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = value(i, Full{});
    sums[0] = fma(v, v, sums[0]);
  }
  if (i < n) {
    const Vec v = value(i, Tail{n - i});
    sums[1] = fma(v, v, sums[1]);
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float inverse_rms(float squares, int64_t width, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + epsilon);
}

struct NoWeight {
  explicit NoWeight(const void*) {}

  template <class Part>
  Vec apply(Vec normalised, int64_t, Part) const {
    return normalised;
  }
};

template <class W>
struct Weight {
  explicit Weight(const void* data) : values(static_cast<const W*>(data)) {}

  template <class Part>
  Vec apply(Vec normalised, int64_t i, Part part) const {
    const Vec weight = Lanes<W>::load(values + i, part);
    return Lanes<W>::round(mul(Lanes<W>::round(normalised), weight));
  }

  const W* values;
};

template <class T, class W>
inline void write_normalised(T* out, const T* x, W weight, float scale, int64_t width) {
  const Vec scales = splat(scale);
  for_each_vec(width, [=](int64_t i, auto part) {
    const Vec normalised = mul(Lanes<T>::load(x + i, part), scales);
    Lanes<T>::store(out + i, weight.apply(normalised, i, part), part);
  });
}

}  // namespace
