// The parallel loop around a kernel.
#pragma once

#include <type_traits>

#include "types.h"

namespace opweave {

// Run kernel over [0, rows), each row being `row_elements` of work. Small calls stay on the
// caller's thread; others share torch's thread pool, or stay serial where torch offers none.
void for_rows(int64_t rows, int64_t row_elements, OpweaveRangeKernel kernel, void* call);

// The same for a lambda body(begin, end). It must not throw: it may run in a thread of torch's.
template <class Body>
void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
  static_assert(std::is_invocable_v<const Body&, int64_t, int64_t>,
                "the body of for_rows takes (int64_t begin, int64_t end)");
  const auto call = [](int64_t begin, int64_t end, void* context) noexcept {
    (*static_cast<const Body*>(context))(begin, end);
  };
  for_rows(rows, row_elements, call, const_cast<Body*>(&body));
}

// How many threads share such a loop; two where torch does not say.
int64_t thread_count();

}  // namespace opweave
