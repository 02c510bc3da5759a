// The check of a vector with one element for each column of a tensor, such as a weight or a bias.
#pragma once

#include "core/check.h"

namespace opweave {

// `vector` has x's dtype or float32, one element for each in the last dimension of x, and is not
// written through `out`.
inline void check_per_column(const View& vector, const View& x, const View& out) {
  if (vector.dtype != x.dtype) check_dtype(vector, {x.dtype, OPWEAVE_FLOAT32});
  const int64_t width = x.sizes[x.rank - 1];
  if (vector.rank != 1 || vector.sizes[0] != width) {
    throw CheckFailed(std::string(vector.name) + " must be None or have shape [" +
                      std::to_string(width) + "], the last dimension of " + x.name + ", found " +
                      describe(vector));
  }
  check_unit_stride(vector);
  check_disjoint(out, vector);
}

}  // namespace opweave
