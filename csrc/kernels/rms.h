// The two passes of RMS normalisation over one row: the sum of squares, then the scaled values.
//
// The rounding is part of the op's definition: normalise in float32, round to the weight's type,
// multiply, round to the weight's type, round to x's type.
#pragma once

#include "kernels/kernels.h"
#include "kernels/row_sum.h"

namespace {

template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
  return sum_of_squares<T>(width,
                           [=](int64_t i, auto part) { return Lanes<T>::load(x + i, part); });
}

// sum = x + residual; returns the sum of its squares. The norm sees the sum as it is stored. sum
// may be x or residual.
template <class T>
inline float add_and_sum_squares(T* sum, const T* x, const T* residual, int64_t width) {
  const auto exact = [=](int64_t i, auto part) {
    return add(Lanes<T>::load(x + i, part), Lanes<T>::load(residual + i, part));
  };
  const auto group_at = [=](int64_t i) {
    Group<T> group = group_of<T>(i, exact);
    group.round_and_store(sum + i);
    return group;
  };
  const auto vec_at = [=](int64_t i, auto part) {
    const Vec stored = Lanes<T>::stored(exact(i, part));
    Lanes<T>::store(sum + i, stored, part);
    return stored;
  };
  return sum_over<T>(width, group_at, vec_at, accumulate_square);
}

inline float inverse_rms(float squares, int64_t width, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + epsilon);
}

// apply() leaves the last rounding, to x's type, to whoever stores the value: x's type is the
// weight's or the narrower one.
struct NoWeight {
  template <class T>
  using Widest = T;

  template <class Part>
  Vec apply(Vec normalised, int64_t, Part) const {
    return normalised;
  }
};

template <class W>
struct Weight {
  template <class T>
  using Widest = W;

  explicit Weight(const void* data) : values(static_cast<const W*>(data)) {}

  template <class Part>
  Vec apply(Vec normalised, int64_t i, Part part) const {
    return mul(Lanes<W>::round(normalised), Lanes<W>::load(values + i, part));
  }

  const W* values;
};

// Call visit with the weight of rows of T, which is null, of type T or of float32.
template <class T, class Visit>
inline void with_weight(const void* weight, OpweaveDtype dtype, Visit visit) {
  if (weight == nullptr) return visit(NoWeight{});
  if (dtype == OPWEAVE_FLOAT32) return visit(Weight<float>(weight));
  visit(Weight<T>(weight));
}

template <class T, class W>
inline void write_normalised(T* out, const T* x, W weight, float scale, int64_t width) {
  const Vec scales = splat(scale);
  store_row<typename W::template Widest<T>, 1>(out, width, [=](int64_t i, auto part) {
    return weight.apply(mul(Lanes<T>::load(x + i, part), scales), i, part);
  });
}

}  // namespace
