// Argument checks. Messages name the argument, the value found and the accepted values; run()
// prepends the name of the op.
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

// Throw CheckFailed unless a condition of the op holds.
inline void check(bool holds, const char* message) {
  if (!holds) throw CheckFailed(message);
}

[[noreturn]] void fail_rank(const View& view);
[[noreturn]] void fail_device(const View& view, const View& first);
void check_overlapping_ranges(const View& written, const View& other);

// Check that the view has at most OPWEAVE_MAX_RANK dimensions.
inline void check_rank(const View& view) {
  if (view.rank > OPWEAVE_MAX_RANK) fail_rank(view);
}

inline void check_same_device(const View& view, const View& first) {
  if (view.device != first.device || view.device_index != first.device_index) {
    fail_device(view, first);
  }
}

void check_dtype(const View& view, std::initializer_list<OpweaveDtype> admitted);

// Check that view has the dtype of other.
void check_same_dtype(const View& view, const View& other);

// Check that view has the sizes of other.
void check_same_sizes(const View& view, const View& other);

// Check that the last dimension exists and is contiguous.
void check_unit_stride(const View& view);

// Check that the view is contiguous in row-major order.
void check_contiguous(const View& view);

// Check that no two indices of an output refer to the same element.
void check_no_self_overlap(const View& written);

// Check that an output does not overlap another tensor.
inline void check_disjoint(const View& written, const View& other) {
  if (written.end() <= other.data || other.end() <= written.data) return;
  check_overlapping_ranges(written, other);
}

// Like check_disjoint, but both may be the same tensor.
void check_disjoint_or_same(const View& written, const View& other);

}  // namespace opweave
