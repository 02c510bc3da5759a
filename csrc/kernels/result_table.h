// The results of a function of one 16-bit number, for calls so large that to look them up is less
// work than to compute them.
//
// A table belongs to one call: nothing stays in memory, and what a call of this size reads drives
// everything else out of the caches anyway.
#pragma once

#include "kernels/vec.h"

namespace {

template <class T>
class ResultTable {
 public:
  static constexpr int64_t kSize = 65536;

  // Whether to make the table is little of the work, and the caches are too small for the call.
  static bool is_worth_it(int64_t elements) { return elements >= 32 * kSize; }

  // apply(out, x, n) computes the results of n numbers; out may be x.
  template <class Apply>
  explicit ResultTable(Apply apply) {
    for (int64_t i = 0; i < kSize; ++i) results_[i].bits = static_cast<uint16_t>(i);
    apply(results_, static_cast<const T*>(results_), kSize);
  }

  // out may be x.
  void look_up(T* out, const T* x, int64_t n) const {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first result is the lowest");
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {  // one store is faster than four
      const uint64_t four = at(x[i]) | at(x[i + 1]) << 16 | at(x[i + 2]) << 32 | at(x[i + 3]) << 48;
      memcpy(out + i, &four, sizeof four);
    }
    for (; i < n; ++i) out[i] = results_[x[i].bits];
  }

 private:
  uint64_t at(T x) const { return results_[x.bits].bits; }

  alignas(64) T results_[kSize];
};

}  // namespace
