// Checks and sizes that the linear layers share.
#pragma once

#include <string>

#include "module/shapes.h"

namespace opweave {

inline void check_out(const View& out, const View& x, const View& weight) {
  check_same_dtype(out, x);
  bool fits = out.rank == x.rank && out.sizes[x.rank - 1] == weight.sizes[0];
  for (int d = 0; fits && d + 1 < x.rank; ++d) fits = out.sizes[d] == x.sizes[d];
  if (!fits) {
    std::string wanted = "[";
    for (int d = 0; d + 1 < x.rank; ++d) wanted += std::to_string(x.sizes[d]) + ", ";
    refuse_shape(out, wanted + std::to_string(weight.sizes[0]) + "]");
  }
  check_contiguous(out);
}

inline void check_bias(const View& bias, const View& x, int64_t out_features) {
  if (bias.dtype != x.dtype) check_dtype(bias, {x.dtype, OPWEAVE_FLOAT32});
  if (bias.rank != 1 || bias.sizes[0] != out_features) {
    refuse_shape(bias, "[" + std::to_string(out_features) + "], one element per row of weight");
  }
  check_unit_stride(bias);
}

// The work of the parallel loop per weight: reading a weight costs as much as the products with
// four tokens.
inline int64_t work_per_weight(int64_t tokens) { return 1 + tokens / 4; }

}  // namespace opweave
