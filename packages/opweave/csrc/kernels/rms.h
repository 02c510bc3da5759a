// RMS norm of one row in two passes: the sum of squares, then the scaled values.
//
// The rounding follows the op's definition: normalize in float32, round to the weight's type,
// multiply, round to the weight's type, round to x's type.
#pragma once

#include "kernels/kernels.h"
#include "kernels/prefetch.h"
#include "kernels/row_sum.h"
#include "kernels/vec_dot.h"

namespace {

// Adds squares: kLeast elements of a block to each of four sums, or up to kLeast elements to one.
template <class T>
struct Squares {
  static constexpr int64_t kLeast = kLanes;

  static void add_block(const T* x, Vec (&sums)[4]) {
    constexpr int kVecs = Group<T>::kVecs;
    for (int k = 0; k < 4; k += kVecs) {
      const Group<T> group = group_of<T>(k * kLanes, Loaded<T>{x});
      for (int g = 0; g < kVecs; ++g) sums[k + g] = accumulate_square(group.v[g], sums[k + g]);
    }
  }
  template <class Part>
  static Vec add(const T* x, Part part, Vec total) {
    return accumulate_square(Lanes<T>::load(x, part), total);
  }
  // Return the sum, recomputed if flushed denormals would have contributed to it.
  static float exact(float sum, const T*, int64_t) { return sum; }
  // Return whether four sums need no correction. Correcting them one by one would stall the load of
  // the vector.
  static bool are_exact(const float*) { return true; }
};

#if defined(__AVX512BF16__)
// Squares pairs of bfloat16 without widening, which flushes denormal inputs, squares and sums.
template <>
struct Squares<BFloat16> {
  using Pairs = Dot<BFloat16>;
  static constexpr int64_t kLeast = Pairs::kWidth;

  static void add_block(const BFloat16* x, Vec (&sums)[4]) {
    for (int k = 0; k < 4; ++k) sums[k] = add(x + k * kLeast, Full{}, sums[k]);
  }
  template <class Part>
  static Vec add(const BFloat16* x, Part part, Vec total) {
    const auto pairs = Pairs::key(x, part);
    return Pairs::step(pairs, pairs, total);
  }
  static float exact(float sum, const BFloat16* x, int64_t width) {
    return is_exact(sum) ? sum : sum_of_squares<BFloat16>(width, Loaded<BFloat16>{x});
  }
  static bool are_exact(const float* sums) {
    return is_exact(sums[0]) && is_exact(sums[1]) && is_exact(sums[2]) && is_exact(sums[3]);
  }

 private:
  static bool is_exact(float sum) { return sum > 0x1p-80f; }
};
#endif

// Return partial sums of the squares of a row, one per lane.
template <class T, class Ahead = Next<>>
inline Vec lanes_of_squares(const T* x, int64_t width, Ahead next = {}) {
  using Step = Squares<T>;
  Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * Step::kLeast <= width; i += 4 * Step::kLeast) {
    next.template fetch_span<4 * Step::kLeast>(i);
    Step::add_block(x + i, sums);
  }
  for (; i + Step::kLeast <= width; i += Step::kLeast) {
    sums[0] = Step::add(x + i, Full{}, sums[0]);
  }
  if (i < width) sums[1] = Step::add(x + i, Tail{width - i}, sums[1]);
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

template <class T, class Ahead = Next<>>
inline float sum_of_squares(const T* x, int64_t width, Ahead next = {}) {
  return Squares<T>::exact(sum(lanes_of_squares(x, width, next)), x, width);
}

// Compute sum = x + residual, and return the sum of squares of the rounded sum. sum may be x or
// residual.
template <class T, class Ahead = Next<>>
inline float add_and_sum_squares(T* sum, const T* x, const T* residual, int64_t width,
                                 Ahead next = {}) {
  const auto exact = [=](int64_t i, auto part) {
    return add(Lanes<T>::load(x + i, part), Lanes<T>::load(residual + i, part));
  };
  const auto group_at = [=](int64_t i) {
    next.template fetch_span<kGroup<T>>(i);
    Group<T> group = group_of<T>(i, exact);
    group.round_and_store(sum + i);
    return group;
  };
  const auto vec_at = [=](int64_t i, auto part) {
    Lanes<T>::store(sum + i, exact(i, part), part);
    return Lanes<T>::load(sum + i, part);
  };
  return sum_over<T>(width, group_at, vec_at, accumulate_square);
}

using Condition = decltype(less(Vec{}, Vec{}));

inline Condition is_finite(Vec scale) { return less(scale, splat(__builtin_inff())); }

inline float inverse_rms(float squares, int64_t width, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + epsilon);
}

// Store the inverse RMS of four rows at once, or of one.
template <class T>
inline void store_inverse_rms(float* to, const T* const (&rows)[1], int64_t width, float epsilon) {
  *to = inverse_rms(sum_of_squares(rows[0], width), width, epsilon);
}
template <class T>
inline void store_inverse_rms(float* to, const T* const (&rows)[4], int64_t width, float epsilon) {
  Vec lanes[4];
  for (int k = 0; k < 4; ++k) lanes[k] = lanes_of_squares(rows[k], width);
  store_sums(to, lanes);
  if (!Squares<T>::are_exact(to)) {
    for (int k = 0; k < 4; ++k) to[k] = Squares<T>::exact(to[k], rows[k], width);
  }
  for (int k = 0; k < 4; ++k) to[k] = inverse_rms(to[k], width, epsilon);
}

// apply() does not round to x's type, which is not wider than the weight's: the store does that.
struct NoWeight {
  template <class T>
  using Widest = T;

  template <class Part>
  Vec apply(Vec normalized, Condition, int64_t, Part) const {
    return normalized;
  }
  template <class Part>
  Halves apply(Halves normalized, int64_t, Part) const {
    return normalized;
  }
};

// A weight of type W, which is stored in memory as Stored.
template <class W, class Stored = W>
struct Weight {
  template <class T>
  using Widest = W;

  explicit Weight(const void* data) : values(static_cast<const Stored*>(data)) {}

  template <class Part>
  Vec apply(Vec normalized, Condition finite, int64_t i, Part part) const {
    const Vec rounded = select(finite, Lanes<W>::round_moderate(normalized), normalized);
    return mul(rounded, Lanes<Stored>::load(values + i, part));
  }
  template <class Part>
  Halves apply(Halves normalized, int64_t i, Part part) const {
    return mul(normalized, load_halves(values + i, part));
  }

  const Stored* values;
};

// Call visit with the weight for rows of T: null, of type T, or float32.
template <class T, class Visit>
inline void with_weight(const void* weight, OpweaveDtype dtype, Visit visit) {
  if (weight == nullptr) return visit(NoWeight{});
  if (dtype == OPWEAVE_FLOAT32) return visit(Weight<float>(weight));
  visit(Weight<T>(weight));
}

// Whether to widen a weight of T once for many rows: without float16 arithmetic, the conversion
// costs as much as the product.
template <class T>
constexpr bool kWidensSlowly = false;
template <>
constexpr bool kWidensSlowly<Float16> = !kHasHalves;

// Call visit with the weight of a call for `rows` rows.
template <class T, class Call, class Visit>
inline void with_weight_of(const Call& call, int64_t rows, Visit visit) {
  if constexpr (kWidensSlowly<T>) {
    constexpr int64_t kLeastRows = 4;
    constexpr int64_t kMostElements = 4096;  // half of an L1 cache
    const bool is_of_t = call.weight != nullptr && call.weight_dtype != OPWEAVE_FLOAT32;
    if (is_of_t && rows >= kLeastRows && call.width <= kMostElements) {
      alignas(64) float widened[kMostElements];
      widen_row(widened, static_cast<const T*>(call.weight), call.width);
      return visit(Weight<T, float>(widened));
    }
  }
  with_weight<T>(call.weight, call.weight_dtype, visit);
}

// The elements of a normalized row, before rounding to T.
template <class T, class W>
struct Normalized {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    return weight.apply(scaled(i, part), has_finite_scale, i, part);
  }
  Halves operator()(int64_t i, FullHalves part) const { return halves(i, part); }
  Halves operator()(int64_t i, TailHalves part) const { return halves(i, part); }

  const T* x;
  W weight;
  Vec scale;
  Condition has_finite_scale;  // then no element exceeds the square root of the width

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
      const auto normalized = [this](int64_t k, auto p) { return scaled(k, p); };
      return weight.apply(halves_of(i, normalized, part), i, part);
    }
  }
};

template <class W>
constexpr bool kGivesHalves<Normalized<Float16, W>> = kHasHalves;

template <class T, class W>
inline Normalized<T, W> normalized(const T* x, W weight, float scale) {
  return {x, weight, splat(scale), is_finite(splat(scale))};
}

// Store a row of values that were multiplied with a weight of type W.
template <class W, class T, class Values>
inline void store_normalized(T* out, int64_t width, Values values) {
  store_row<typename W::template Widest<T>, 1>(out, width, values);
}

}  // namespace
