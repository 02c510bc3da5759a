// RMS normalisation, compiled once per instruction set.
#include "kernels/norm.h"

#include "kernels/prefetch.h"
#include "kernels/rms.h"
#include "kernels/row_cursor.h"
#include "kernels/storage.h"
#include "kernels/table.h"

namespace {

struct RmsNormRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveRmsNorm& call) {
    with_weight<T>(call.weight, call.weight_dtype, [&](auto weight) {
      RowCursor row(call.rows, begin);
      RowCursor next_row(call.rows, begin + 1);
      for (int64_t r = begin; r < end; ++r, row.advance(), next_row.advance()) {
        T* out = reinterpret_cast<T*>(row.in(static_cast<char*>(call.out), 0));
        const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
        const auto next = next_rows(
            reinterpret_cast<const T*>(next_row.in(static_cast<const char*>(call.x), 1)),
            reinterpret_cast<const T*>(next_row.in(static_cast<const char*>(call.out), 0)));
        const float scale = inverse_rms(sum_of_squares(x, call.width), call.width, call.epsilon);
        const auto values = fetching_if<kIsFetched<T>>(normalised(x, weight, scale), next);
        store_normalised<decltype(weight)>(out, call.width, values);
      }
    });
  }
};

struct AddRmsNormRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveAddRmsNorm& call) {
    with_weight<T>(call.weight, call.weight_dtype, [&](auto weight) {
      RowCursor row(call.rows, begin);
      RowCursor sum_row(call.sum_rows, begin);
      RowCursor next_row(call.rows, begin + 1);
      RowCursor next_sum_row(call.sum_rows, begin + 1);
      for (int64_t r = begin; r < end;
           ++r, row.advance(), sum_row.advance(), next_row.advance(), next_sum_row.advance()) {
        T* out = reinterpret_cast<T*>(row.in(static_cast<char*>(call.out), 0));
        T* sum = reinterpret_cast<T*>(sum_row.in(static_cast<char*>(call.sum), 0));
        const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
        const T* residual =
            reinterpret_cast<const T*>(sum_row.in(static_cast<const char*>(call.residual), 1));
        const auto next = next_rows(
            reinterpret_cast<const T*>(next_row.in(static_cast<const char*>(call.x), 1)),
            reinterpret_cast<const T*>(
                next_sum_row.in(static_cast<const char*>(call.residual), 1)));
        const float squares = add_and_sum_squares(sum, x, residual, call.width);
        const float scale = inverse_rms(squares, call.width, call.epsilon);
        constexpr bool kIsWanted = sizeof(T) == sizeof(uint16_t);
        const auto exact = normalised(static_cast<const T*>(sum), weight, scale);
        const auto values = fetching_if<kIsWanted>(exact, next);
        store_normalised<decltype(weight)>(out, call.width, values);
      }
    });
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveNormKernels, norm) = {
    run_for_type<RmsNormRows, OpweaveRmsNorm>,
    run_for_type<AddRmsNormRows, OpweaveAddRmsNorm>,
};
