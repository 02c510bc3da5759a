#include "parallel.h"

#include "torch_shim.h"

namespace opweave {
namespace {

// The minimum work per thread: 2 us for the fastest kernel (18 bfloat16 elements per ns, in cache),
// 10 to 30 us for most. Less does not pay for waking a thread. torch's own loops use the same
// value.
constexpr int64_t kGrainElements = int64_t{1} << 15;

}  // namespace

void for_rows(int64_t rows, int64_t row_elements, OpweaveRangeKernel kernel, void* call) {
  if (rows == 0) return;
  const bool is_small = rows == 1 || rows * row_elements <= kGrainElements;
  const auto parallel_for = torch_shim().parallel_for;
  if (is_small || parallel_for == nullptr) {
    kernel(0, rows, call);
    return;
  }
  const int64_t grain = row_elements >= kGrainElements ? 1 : kGrainElements / row_elements;
  parallel_for(0, rows, grain, kernel, call);
}

int64_t thread_count() {
  if (torch_shim().parallel_for == nullptr) return 1;
  uint32_t threads = 2;
  if (torch_shim().get_num_threads != nullptr) torch_shim().get_num_threads(&threads);
  return threads;
}

}  // namespace opweave
