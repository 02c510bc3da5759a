// Quantization to 8 bits, compiled once per instruction set.
//
// The arithmetic follows the ops' definitions operation by operation in float32, so results are
// bitwise equal to native.
#include "kernels/quant.h"

#include "kernels/quant_row.h"
#include "kernels/row_cursor.h"
#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

struct StaticQuantRows {
  template <class T, class Q>
  static void run(int64_t begin, int64_t end, const OpweaveStaticQuant& call) {
    Rows<T, typename Q::Storage> rows(call.rows, call.out, call.x, begin);
    for (int64_t r = begin; r < end; ++r, rows.advance()) {
      auto* out = rows.out();
      const T* x = rows.x();
      const auto next = next_rows_if<!Tuning::kFollowsPages>(rows.next_x());
      const float* scales = call.scales + r / call.block_rows * call.row_blocks;
      if (call.block_columns == 1) {
        quantize_columns<Q>(out, call.width, scales, fetching(Loaded<T>{x}, next));
        continue;
      }
      for (int64_t i = 0; i < call.width; i += call.block_columns) {
        quantize_row<Q, true>(out + i, call.block_columns, *scales++, x + i, next.from(i));
      }
    }
  }

  template <class Q, class Value>
  static void quantize_columns(typename Q::Storage* out, int64_t n, const float* scales,
                               Value value) {
    const auto scaled = [=](int64_t i, auto part) {
      return mul(value(i, part), div(splat(1), Lanes<float>::load(scales + i, part)));
    };
    store_codes(out, n, scaled, Q::template codes<true>);
  }
};

struct PerTokenQuantRows {
  template <class T, class Q>
  static void run(int64_t begin, int64_t end, const OpweavePerTokenQuant& call) {
    Rows<T, typename Q::Storage> rows(call.rows, call.out, call.x, begin,
                                      rows_ahead<T>(call.width));
    for (int64_t r = begin; r < end; ++r, rows.advance()) {
      auto* out = rows.out();
      const T* x = rows.x();
      const auto next =
          three_walks<true, true>(next_rows_if<!kFollowsRows<T>>(rows.next_x()), call.width);
      const float largest = largest_of_row(x, call.width, next.quick);
      call.scales[r] =
          quantize_row_of<Q>(out, call.width, largest, call.upper_bound, x, next.others);
    }
  }
};

struct GroupQuantRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveGroupQuant& call) {
    const int64_t groups = (call.width + call.group_size - 1) / call.group_size;
    Rows<T, uint8_t> rows(call.rows, call.out, call.x, begin, rows_ahead<T>(call.width));
    for (int64_t r = begin; r < end; ++r, rows.advance()) {
      auto* out = rows.out();
      const T* x = rows.x();
      constexpr bool kInMaximum = sizeof(T) == sizeof(float);  // no effect with 16 bits
      const auto next =
          three_walks<kInMaximum, true>(next_rows_if<!kFollowsRows<T>>(rows.next_x()), call.width);
      quantize_stored_groups(out, call.scales + r * groups, call.width, call.group_size,
                             call.power_of_two != 0, x, walks(next.quick, next.others));
    }
  }
};

struct LargestRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLargest& call) {
    RowCursor row(call.rows, begin);
    for (int64_t r = begin; r < end; ++r, row.advance()) {
      const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 0));
      call.largest[r] = largest_of_row(x, call.width);
    }
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveQuantKernels, quant) = {
    run_for_types<StaticQuantRows, OpweaveStaticQuant>,
    run_for_types<PerTokenQuantRows, OpweavePerTokenQuant>,
    run_for_type<GroupQuantRows, OpweaveGroupQuant>,
    run_for_type<LargestRows, OpweaveLargest>,
};
