// The parallel loop around a kernel.
#pragma once

#include "kernels/kernels.h"

namespace opweave {

// Run kernel over [0, rows), each row being `row_elements` of work. Small calls stay on the
// caller's thread; others share torch's thread pool, or stay serial where torch offers none.
void for_rows(int64_t rows, int64_t row_elements, OpweaveRangeKernel kernel, void* call);

}  // namespace opweave
