// The two passes of RMS normalisation over one row: the sum of squares, then the scaled values.
//
// The rounding is part of the op's definition: normalise in float32, round to the weight's type,
// multiply, round to the weight's type, round to x's type.
#pragma once

#include "kernels/kernels.h"
#include "kernels/row_sum.h"
#include "kernels/vec_dot.h"
#include "kernels/vec_reduce.h"

namespace {

template <class T>
inline float sum_of_squares_as_float(const T* x, int64_t width) {
  return sum_of_squares<T>(width, Loaded<T>{x});
}

template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
  return sum_of_squares_as_float(x, width);
}

// Adds the squares of kStep elements, or fewer.
template <class T>
struct Squares {
  static constexpr int64_t kStep = kGroup<T>;

  static Vec add(const T* x, Vec total) {
    const Group<T> group = group_of<T>(0, Loaded<T>{x});
    for (Vec v : group.v) total = accumulate_square(v, total);
    return total;
  }
  static Vec add(const T* x, int64_t n, Vec total) {
    for_each_vec(n, [&](int64_t i, auto part) {
      total = accumulate_square(Lanes<T>::load(x + i, part), total);
    });
    return total;
  }
  static bool is_exact(float) { return true; }
};

#if defined(__AVX512BF16__)
// Pairs are squared as they are. That flushes denormals, squares and sums too, so small ones don't
// count.
template <>
struct Squares<BFloat16> {
  using Pairs = Dot<BFloat16>;
  static constexpr int64_t kStep = Pairs::kWidth;

  static Vec add(const BFloat16* x, Vec total) { return add(x, Full{}, total); }
  static Vec add(const BFloat16* x, int64_t n, Vec total) { return add(x, Tail{n}, total); }
  static bool is_exact(float total) { return total > 0x1p-80f; }

 private:
  template <class Part>
  static Vec add(const BFloat16* x, Part part, Vec total) {
    const auto pairs = Pairs::key(x, part);
    return Pairs::step(pairs, pairs, total);
  }
};

inline float sum_of_squares(const BFloat16* x, int64_t width) {
  using Step = Squares<BFloat16>;
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * Step::kStep <= width; i += 4 * Step::kStep) {
    for (int k = 0; k < 4; ++k) sums[k] = Step::add(x + i + k * Step::kStep, sums[k]);
  }
  for (; i + Step::kStep <= width; i += Step::kStep) sums[0] = Step::add(x + i, sums[0]);
  if (i < width) sums[1] = Step::add(x + i, width - i, sums[1]);
  const float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return Step::is_exact(total) ? total : sum_of_squares_as_float(x, width);
}
#endif

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

template <class T>
inline void store_sums_of_squares(float* to, const T* const (&rows)[4], int64_t width) {
  using Step = Squares<T>;
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + Step::kStep <= width; i += Step::kStep) {
    for (int k = 0; k < 4; ++k) sums[k] = Step::add(rows[k] + i, sums[k]);
  }
  if (i < width) {
    for (int k = 0; k < 4; ++k) sums[k] = Step::add(rows[k] + i, width - i, sums[k]);
  }
  store_sums(to, sums);
  bool are_exact = true;
  for (int k = 0; k < 4; ++k) are_exact &= Step::is_exact(to[k]);
  if (are_exact) return;
  for (int k = 0; k < 4; ++k) to[k] = sum_of_squares_as_float(rows[k], width);
}

// The same of four rows at once, or of one.
template <class T>
inline void store_inverse_rms(float* to, const T* const (&rows)[1], int64_t width, float epsilon) {
  *to = inverse_rms(sum_of_squares(rows[0], width), width, epsilon);
}
template <class T>
inline void store_inverse_rms(float* to, const T* const (&rows)[4], int64_t width, float epsilon) {
  store_sums_of_squares(to, rows, width);
  for (int k = 0; k < 4; ++k) to[k] = inverse_rms(to[k], width, epsilon);
}

// apply() leaves the last rounding, to x's type, to whoever stores the value: x's type is the
// weight's or the narrower one.
struct NoWeight {
  template <class T>
  using Widest = T;

  template <class V, class Part>
  V apply(V normalised, int64_t, Part) const {
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
    return mul(Lanes<W>::round_moderate(normalised), Lanes<W>::load(values + i, part));
  }
  template <class Part>
  Halves apply(Halves normalised, int64_t i, Part part) const {
    return mul(normalised, load_halves(values + i, part));
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

// The elements of a normalised row, before they are rounded to T.
template <class T, class W>
struct Normalised {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    return weight.apply(scaled(i, part), i, part);
  }
  Halves operator()(int64_t i, FullHalves part) const { return halves(i, part); }
  Halves operator()(int64_t i, TailHalves part) const { return halves(i, part); }

  const T* x;
  W weight;
  Vec scale;

 private:
  template <class Part>
  Vec scaled(int64_t i, Part part) const {
    return mul(Lanes<T>::load(x + i, part), scale);
  }
  template <class Part>
  Halves halves(int64_t i, Part part) const {
    if constexpr (sizeof(typename W::template Widest<T>) == sizeof(float)) {
      return halves_of(i, *this, part);
    } else {
      const auto normalised = [this](int64_t k, auto p) { return scaled(k, p); };
      return weight.apply(halves_of(i, normalised, part), i, part);
    }
  }
};

template <class W>
constexpr bool kGivesHalves<Normalised<Float16, W>> = kHasHalves;

template <class T, class W>
inline Normalised<T, W> normalised(const T* x, W weight, float scale) {
  return {x, weight, splat(scale)};
}

// Store a row of values that a weight of type W has made.
template <class W, class T, class Values>
inline void store_normalised(T* out, int64_t width, Values values) {
  store_row<typename W::template Widest<T>, 1>(out, width, values);
}

}  // namespace
