// What ops with arguments of a fixed number of dimensions ask of them.
#pragma once

#include <string>

#include "core/check.h"

namespace opweave {

[[noreturn]] inline void refuse_shape(const View& view, const std::string& expected) {
  throw CheckFailed(std::string(view.name) + " must have shape " + expected + ", found " +
                    describe(view));
}

// The blocks of a paged cache [blocks, heads, block_size, size] are contiguous. They may lie apart,
// as in a tensor that holds keys and values.
inline void check_contiguous_blocks(const View& cache) {
  if (cache.element_count() == 0) return;
  View block = cache;
  block.rank = 3;
  block.sizes = cache.sizes + 1;
  block.strides = cache.strides + 1;
  check_contiguous(block);
}

}  // namespace opweave
