// What the ops that normalise or quantise rows ask of their arguments.
#pragma once

#include <limits>
#include <string>

#include "core/check.h"

namespace opweave {

// Rows of a type that kernels compute with.
inline void check_activation(const View& x) {
  check_dtype(x, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  check_unit_stride(x);
}

// One element per position in the last dimension of x.
inline void check_weight(const View& weight, const View& x) {
  if (weight.dtype != x.dtype) check_dtype(weight, {x.dtype, OPWEAVE_FLOAT32});
  const int64_t width = x.sizes[x.rank - 1];
  if (weight.rank != 1 || weight.sizes[0] != width) {
    throw CheckFailed("weight must be None or have shape [" + std::to_string(width) +
                      "], the last dimension of " + x.name + ", found " + describe(weight));
  }
  check_unit_stride(weight);
}

// Rows of 8 bits.
inline void check_quantised(const View& out) {
  check_dtype(out, {OPWEAVE_FLOAT8_E4M3FN, OPWEAVE_INT8});
  check_unit_stride(out);
}

// scale has the sizes of x but for the last one, which is `last`.
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

// What no magnitude may count above.
inline float read_bound(const View* scale_ub) {
  if (scale_ub == nullptr) return std::numeric_limits<float>::infinity();
  check_dtype(*scale_ub, {OPWEAVE_FLOAT32});
  if (scale_ub->element_count() != 1) {
    throw CheckFailed("scale_ub must be None or have one element, found " + describe(*scale_ub));
  }
  return *reinterpret_cast<const float*>(scale_ub->data);
}

}  // namespace opweave
