// Argument checks of row-wise ops.
#pragma once

#include <limits>
#include <string>

#include "core/check.h"

namespace opweave {

// Check that x has a float dtype and contiguous rows.
inline void check_activation(const View& x) {
  check_dtype(x, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  check_unit_stride(x);
}

// Check that out has contiguous rows with the dtype and shape of x; out may be x.
inline void check_rows_like(const View& out, const View& x) {
  check_same_sizes(out, x);
  check_same_dtype(out, x);
  check_unit_stride(out);
  check_disjoint_or_same(out, x);
}

// Check that out has the shape of x with half of its last dimension.
inline void check_half_of(const View& out, const View& x) {
  const int last = x.rank - 1;
  bool fits = out.rank == x.rank && 2 * out.sizes[last] == x.sizes[last];
  for (int d = 0; fits && d < last; ++d) fits = out.sizes[d] == x.sizes[d];
  if (fits) return;
  throw CheckFailed("out must have the shape of x with half of its last dimension, found " +
                    describe(out) + " for x of shape " + to_string(x.sizes, x.rank) +
                    "; the last dimension of x must be even");
}

// Check a weight or bias: one element per column of x, in the dtype of x or float32.
inline void check_per_column(const View& vector, const View& x) {
  if (vector.dtype != x.dtype) check_dtype(vector, {x.dtype, OPWEAVE_FLOAT32});
  const int64_t width = x.sizes[x.rank - 1];
  if (vector.rank != 1 || vector.sizes[0] != width) {
    throw CheckFailed(std::string(vector.name) + " must be None or have shape [" +
                      std::to_string(width) + "], the last dimension of " + x.name + ", found " +
                      describe(vector));
  }
  check_unit_stride(vector);
}

// Check that out has an 8-bit dtype and contiguous rows.
inline void check_quantized(const View& out) {
  check_dtype(out, {OPWEAVE_FLOAT8_E4M3FN, OPWEAVE_INT8});
  check_unit_stride(out);
}

inline void check_one_scale(const View& scale) {
  check_dtype(scale, {OPWEAVE_FLOAT32});
  if (scale.element_count() == 1) return;
  throw CheckFailed(std::string(scale.name) + " must have one element, found " + describe(scale));
}

// Check that scale is float32 with the sizes of x, except for the last one, which is `last`.
inline void check_row_scales(const View& scale, const View& x, int64_t last) {
  check_dtype(scale, {OPWEAVE_FLOAT32});
  check_contiguous(scale);
  bool fits = scale.rank == x.rank && scale.sizes[x.rank - 1] == last;
  for (int d = 0; fits && d + 1 < x.rank; ++d) fits = scale.sizes[d] == x.sizes[d];
  if (fits) return;
  std::string wanted = "[";
  for (int d = 0; d + 1 < x.rank; ++d) wanted += std::to_string(x.sizes[d]) + ", ";
  throw CheckFailed("scale must have shape " + wanted + std::to_string(last) + "], found " +
                    describe(scale));
}

// Check that scale has one element per group of a row of x; the last group may be smaller.
inline void check_group_scales(const View& scale, const View& x, int64_t width, int64_t size) {
  if (size < 1) {
    throw CheckFailed("group_size must be at least 1, found " + std::to_string(size));
  }
  check_row_scales(scale, x, width / size + (width % size != 0));
}

// Return the upper bound for the largest magnitude; infinity without scale_ub.
inline float read_bound(const View* scale_ub) {
  if (scale_ub == nullptr) return std::numeric_limits<float>::infinity();
  check_dtype(*scale_ub, {OPWEAVE_FLOAT32});
  if (scale_ub->element_count() != 1) {
    throw CheckFailed("scale_ub must be None or have one element, found " + describe(*scale_ub));
  }
  return *reinterpret_cast<const float*>(scale_ub->data);
}

}  // namespace opweave
