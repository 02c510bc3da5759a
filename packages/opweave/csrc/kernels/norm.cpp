// RMS norms, compiled once per instruction set.
#include "kernels/norm.h"

#include "kernels/prefetch.h"
#include "kernels/rms.h"
#include "kernels/rows.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/tuning.h"

namespace {

struct RmsNormRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveRmsNorm& call) {
    with_weight_of<T>(call, end - begin, [&](auto weight) {
      Rows<T> rows(call.rows, call.out, call.x, begin, rows_ahead<T>(call.width));
      for (int64_t r = begin; r < end; ++r, rows.advance()) {
        const auto next = walks_of(rows, call.width);
        const float squares = sum_of_squares(rows.x(), call.width, next.first);
        const float scale = inverse_rms(squares, call.width, call.epsilon);
        store_normalized<decltype(weight)>(rows.out(), call.width,
                                           paced(normalized(rows.x(), weight, scale), next.second));
      }
    });
  }

 private:
  // Return the prefetches during and after the sum.
  template <class T>
  static auto walks_of(const Rows<T>& rows, int64_t width) {
    constexpr bool kIsWanted = kIsFetched<T> && !kFollowsRows<T>;
    const auto next = next_rows_if<kIsWanted>(rows.next_x(), rows.next_out());
    if constexpr (Tuning::kFetchesInSum && sizeof(T) == sizeof(float)) {
      return two_walks(next, width);
    } else {
      return walks(next_rows(), next);
    }
  }
};

struct AddRmsNormRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveAddRmsNorm& call) {
    with_weight_of<T>(call, end - begin, [&](auto weight) {
      Rows<T> rows(call.rows, call.out, call.x, begin);
      Rows<T> sums(call.sum_rows, call.sum, call.residual, begin);
      for (int64_t r = begin; r < end; ++r, rows.advance(), sums.advance()) {
        const auto next =
            two_walks(next_rows_if<kIsFetched<T>>(rows.next_x(), sums.next_x()), call.width);
        const float squares =
            add_and_sum_squares(sums.out(), rows.x(), sums.x(), call.width, next.first);
        const float scale = inverse_rms(squares, call.width, call.epsilon);
        const T* sum = sums.out();
        store_normalized<decltype(weight)>(rows.out(), call.width,
                                           paced(normalized(sum, weight, scale), next.second));
      }
    });
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveNormKernels, norm) = {
    run_for_type<RmsNormRows, OpweaveRmsNorm>,
    run_for_type<AddRmsNormRows, OpweaveAddRmsNorm>,
};
