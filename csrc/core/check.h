// Checks of arguments. A message names the argument, what was found and what is possible; run()
// puts the op's name in front.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "view.h"

namespace opweave {

class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A condition of the op's own.
inline void check(bool holds, const char* message) {
  if (!holds) throw CheckFailed(message);
}

[[noreturn]] void fail_rank(const View& view);
[[noreturn]] void fail_device(const View& view, const View& first);
void check_overlapping_ranges(const View& written, const View& other);

// At most OPWEAVE_MAX_RANK dimensions.
inline void check_rank(const View& view) {
  if (view.rank > OPWEAVE_MAX_RANK) fail_rank(view);
}

inline void check_same_device(const View& view, const View& first) {
  if (view.device != first.device || view.device_index != first.device_index) {
    fail_device(view, first);
  }
}

void check_dtype(const View& view, std::initializer_list<OpweaveDtype> admitted);

// view has the dtype of other.
void check_same_dtype(const View& view, const View& other);

// view has the sizes of other.
void check_same_sizes(const View& view, const View& other);

// The last dimension exists and is contiguous.
void check_unit_stride(const View& view);

// The elements lie side by side, in the order of their indices.
void check_contiguous(const View& view);

// No two indices of a tensor that is written lead to the same memory.
void check_no_self_overlap(const View& written);

// Writing one does not change the other.
inline void check_disjoint(const View& written, const View& other) {
  if (written.end() <= other.data || other.end() <= written.data) return;
  check_overlapping_ranges(written, other);
}

// As check_disjoint, but both may be the very same tensor.
void check_disjoint_or_same(const View& written, const View& other);

}  // namespace opweave
