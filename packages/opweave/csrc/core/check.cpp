#include "check.h"

#include <algorithm>

namespace opweave {
namespace {

[[noreturn]] void fail(const View& view, const std::string& expected, const std::string& fix) {
  throw CheckFailed(std::string(view.name) + " must " + expected + ", found " + describe(view) +
                    "; " + fix);
}

bool same_layout(const View& a, const View& b) {
  if (a.rank != b.rank || a.dtype != b.dtype) return false;
  for (int d = 0; d < a.rank; ++d) {
    if (a.sizes[d] != b.sizes[d]) return false;
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

// Return whether two tensors of one layout lie next to each other in wider rows, such as two slices
// of a fused projection: their address ranges overlap, but their elements do not.
bool interleaves(const View& a, const View& b) {
  if (!same_layout(a, b) || a.rank == 0) return false;
  const int last = a.rank - 1;
  const bool has_rows = a.sizes[last] > 1 && a.strides[last] == 1;
  const int outer = has_rows ? last : a.rank;  // with a strided last dimension, rows are elements
  int64_t pitch = 0;
  for (int d = 0; d < outer; ++d) {
    if (a.sizes[d] > 1 && (pitch == 0 || a.strides[d] < pitch)) pitch = a.strides[d];
  }
  if (pitch == 0) return false;
  for (int d = 0; d < outer; ++d) {
    if (a.sizes[d] > 1 && a.strides[d] % pitch != 0) return false;
  }
  const int64_t size = a.element_size();
  const int64_t width = has_rows ? a.sizes[last] * size : size;
  int64_t shift = (b.data - a.data) % (pitch * size);
  if (shift < 0) shift += pitch * size;
  return shift >= width && shift + width <= pitch * size;
}

[[noreturn]] void fail_shared(const View& written, const View& other) {
  throw CheckFailed(std::string(written.name) + " is written and must not share memory with " +
                    other.name + ", found " + describe(written) + " and " + describe(other) +
                    " over the same memory; clone one of them");
}

}  // namespace

void fail_unknown_dtype(const View& view) {
  fail(view, "have a dtype that native kernels take", "convert it first");
}

void fail_rank(const View& view) {
  fail(view, "have at most " + std::to_string(OPWEAVE_MAX_RANK) + " dimensions",
       "flatten() its leading dimensions");
}

void fail_device(const View& view, const View& first) {
  throw CheckFailed(std::string(view.name) + " must be on the same device as " + first.name +
                    "; move one of them");
}

void check_dtype(const View& view, std::initializer_list<OpweaveDtype> admitted) {
  for (OpweaveDtype dtype : admitted) {
    if (view.dtype == dtype) return;
  }
  std::string names;
  for (auto dtype = admitted.begin(); dtype != admitted.end(); ++dtype) {
    if (std::find(admitted.begin(), dtype, *dtype) != dtype) continue;  // already listed
    if (!names.empty()) names += " or ";
    names += dtype_name(*dtype);
  }
  fail(view, "be " + names, "convert it first");
}

void check_same_dtype(const View& view, const View& other) {
  if (other.dtype == OPWEAVE_OTHER_DTYPE) fail_unknown_dtype(other);
  if (view.dtype == other.dtype) return;
  fail(view, std::string("have the dtype of ") + other.name + ", " + dtype_name(other.dtype),
       "convert it first");
}

void check_same_sizes(const View& view, const View& other) {
  bool same = view.rank == other.rank;
  for (int d = 0; same && d < view.rank; ++d) same = view.sizes[d] == other.sizes[d];
  if (same) return;
  fail(view,
       std::string("have the shape of ") + other.name + ", " + to_string(other.sizes, other.rank),
       "native ops do not broadcast");
}

void check_unit_stride(const View& view) {
  if (view.rank == 0) fail(view, "have at least one dimension", "a row of one element is [1]");
  const int last = view.rank - 1;
  if (view.sizes[last] <= 1 || view.strides[last] == 1 || view.element_count() == 0) return;
  fail(view, "be contiguous in its last dimension",
       "call contiguous() on it, or, if it is written, give one that is");
}

void check_contiguous(const View& view) {
  if (view.element_count() == 0) return;
  int64_t expected = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    if (view.sizes[d] != 1 && view.strides[d] != expected) {
      fail(view, "be contiguous",
           "call contiguous() on it, or, if it is written, give one that is");
    }
    expected *= view.sizes[d];
  }
}

void check_no_self_overlap(const View& written) {
  // Sort the dimensions by stride. Each stride must exceed the extent of all smaller dimensions.
  int order[OPWEAVE_MAX_RANK];
  int count = 0;
  for (int d = written.rank - 1; d >= 0; --d) {
    if (written.sizes[d] == 0) return;
    if (written.sizes[d] == 1) continue;
    int at = count++;
    for (; at > 0 && written.strides[order[at - 1]] > written.strides[d]; --at) {
      order[at] = order[at - 1];
    }
    order[at] = d;
  }
  int64_t reach = 0;
  for (int k = 0; k < count; ++k) {
    const int d = order[k];
    if (written.strides[d] <= reach) {
      fail(written, "not overlap itself, because it is written",
           "clone() it (an expanded tensor has one memory cell for many elements)");
    }
    reach += (written.sizes[d] - 1) * written.strides[d];
  }
}

void check_overlapping_ranges(const View& written, const View& other) {
  const bool is_empty = written.extent() == 0 || other.extent() == 0;
  if (!is_empty && !interleaves(written, other)) fail_shared(written, other);
}

void check_disjoint_or_same(const View& written, const View& other) {
  if (written.data == other.data && same_layout(written, other)) return;
  check_disjoint(written, other);
}

}  // namespace opweave
