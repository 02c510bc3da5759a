// Shape checks of ops whose arguments have a fixed number of dimensions.
#pragma once

#include <string>

#include "core/check.h"

namespace opweave {

[[noreturn]] inline void refuse_shape(const View& view, const std::string& expected) {
  throw CheckFailed(std::string(view.name) + " must have shape " + expected + ", found " +
                    describe(view));
}

// Check that the positions of each head in a block of a paged cache [blocks, heads, block_size,
// size] are contiguous. Heads and blocks may have any strides, as in one tensor for both keys and
// values.
inline void check_contiguous_heads(const View& cache) {
  if (cache.element_count() == 0) return;
  View head = cache;
  head.rank = 2;
  head.sizes = cache.sizes + 2;
  head.strides = cache.strides + 2;
  check_contiguous(head);
}

}  // namespace opweave
