// The parallel loop around a kernel.
#pragma once

#include <atomic>
#include <exception>
#include <type_traits>

#include "types.h"

namespace opweave {

// Run kernel over [0, rows), each row being `row_elements` of work. Small calls stay on the
// caller's thread; others share torch's thread pool, or stay serial where torch offers none.
void for_rows(int64_t rows, int64_t row_elements, OpweaveRangeKernel kernel, void* call);

// The same for a lambda body(begin, end). What it throws, in whatever thread, is thrown when all
// have ended; of several exceptions, the first.
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

// How many threads share such a loop; two where torch does not say.
int64_t thread_count();

}  // namespace opweave
