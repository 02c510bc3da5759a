// The parallel loop around a kernel.
#pragma once

#include <atomic>
#include <exception>
#include <type_traits>

#include "types.h"

namespace opweave {

// Run kernel over [0, rows), with `row_elements` of work per row. Small calls run on the calling
// thread, others in torch's thread pool, or serially if torch does not have one.
void for_rows(int64_t rows, int64_t row_elements, OpweaveRangeKernel kernel, void* call);

// Run body(begin, end), a lambda, in the same way. If it throws in any thread, the first exception
// is rethrown when all threads have finished.
template <class Body>
void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
  static_assert(std::is_invocable_v<const Body&, int64_t, int64_t>,
                "the body of for_rows takes (int64_t begin, int64_t end)");
  struct Call {
    const Body& body;
    std::atomic_flag has_thrown = ATOMIC_FLAG_INIT;
    std::exception_ptr error = nullptr;
  };
  Call call{body};
  const auto run = [](int64_t begin, int64_t end, void* context) noexcept {
    auto& call = *static_cast<Call*>(context);
    try {
      call.body(begin, end);
    } catch (...) {
      if (!call.has_thrown.test_and_set()) call.error = std::current_exception();
    }
  };
  for_rows(rows, row_elements, run, &call);
  if (call.error) std::rethrow_exception(call.error);
}

// Return the number of threads of such a loop, or 2 if torch does not provide it.
int64_t thread_count();

}  // namespace opweave
