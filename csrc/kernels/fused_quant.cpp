// A norm or an activation and the quantisation of its result, compiled once per instruction set.
//
// What is quantised is the result as it would have been stored: rounded to the type of x.
#include "kernels/fused_quant.h"

#include "kernels/quant_row.h"
#include "kernels/result_table.h"
#include "kernels/rms.h"
#include "kernels/row_cursor.h"
#include "kernels/table.h"
#include "kernels/vec_math.h"

namespace {

// What happens to the values of a row: one of these per kind of scale.
struct StaticScale {
  template <class Q, class T, class Call, class Value, class Ahead>
  static void write(const Call& call, int64_t, typename Q::Storage* out, Value value, Ahead next) {
    quantise_static<Q, T>(out, call.width, *call.scales, value, next);
  }
};

struct ScalePerToken {
  template <class Q, class T, class Call, class Value, class Ahead>
  static void write(const Call& call, int64_t row, typename Q::Storage* out, Value value,
                    Ahead next) {
    call.scales[row] = quantise_dynamic<Q, T>(out, call.width, call.upper_bound, value, next);
  }
};

struct ScalePerGroup {
  template <class Q, class T, class Call, class Value, class Ahead>
  static void write(const Call& call, int64_t row, uint8_t* out, Value value, Ahead next) {
    const int64_t groups = (call.width + call.group_size - 1) / call.group_size;
    quantise_groups<T>(out, call.scales + row * groups, call.width, call.group_size,
                       call.power_of_two != 0, fetching(value, next));
  }
};

template <class Scale>
struct RmsNormRows {
  template <class T, class Q>
  static void run(int64_t begin, int64_t end, const OpweaveRmsNormQuant& call) {
    with_weight<T>(call.weight, call.weight_dtype,
                   [&](auto weight) { run_weighted<T, Q>(begin, end, call, weight); });
  }

  template <class T, class Q, class W>
  static void run_weighted(int64_t begin, int64_t end, const OpweaveRmsNormQuant& call, W weight) {
    RowCursor row(call.rows, begin);
    RowCursor next_row(call.rows, begin + 1);
    RowCursor residual_row(call.residual_rows, begin);
    RowCursor next_residual_row(call.residual_rows, begin + 1);
    const void* added = call.residual != nullptr ? call.residual : call.x;
    for (int64_t r = begin; r < end; ++r, row.advance(), residual_row.advance(), next_row.advance(),
                 next_residual_row.advance()) {
      auto* out = reinterpret_cast<typename Q::Storage*>(row.in(static_cast<char*>(call.out), 0));
      const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
      float squares;
      if (call.residual == nullptr) {
        squares = sum_of_squares(x, call.width);
      } else {
        T* sum = reinterpret_cast<T*>(residual_row.in(static_cast<char*>(call.residual_out), 0));
        const T* residual =
            reinterpret_cast<const T*>(residual_row.in(static_cast<const char*>(call.residual), 1));
        squares = add_and_sum_squares(sum, x, residual, call.width);
        x = sum;
      }
      const float scale = inverse_rms(squares, call.width, call.epsilon);
      const auto next = next_rows(
          reinterpret_cast<const T*>(next_row.in(static_cast<const char*>(call.x), 1)),
          reinterpret_cast<const T*>(next_residual_row.in(static_cast<const char*>(added), 1)),
          reinterpret_cast<const typename Q::Storage*>(
              next_row.in(static_cast<const char*>(call.out), 0)));
      Scale::template write<Q, T>(call, r, out, normalised(x, weight, scale), next);
    }
  }
};

template <class Scale>
struct SiluAndMulRows {
  template <class T, class Q>
  static void run(int64_t begin, int64_t end, const OpweaveSiluAndMulQuant& call) {
    const auto activation = [](Vec x) { return silu<T>(x); };  // not by address: it is inlined
    with_rounded<T, true>(activation, (end - begin) * call.width, [&](auto activated) {
      run_activated<T, Q>(begin, end, call, activated);
    });
  }

  template <class T, class Q, class Activated>
  static void run_activated(int64_t begin, int64_t end, const OpweaveSiluAndMulQuant& call,
                            Activated activated) {
    RowCursor row(call.rows, begin);
    RowCursor next_row(call.rows, begin + 1);
    for (int64_t r = begin; r < end; ++r, row.advance(), next_row.advance()) {
      auto* out = reinterpret_cast<typename Q::Storage*>(row.in(static_cast<char*>(call.out), 0));
      const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
      const T* next = reinterpret_cast<const T*>(next_row.in(static_cast<const char*>(call.x), 1));
      const auto* next_out = reinterpret_cast<const typename Q::Storage*>(
          next_row.in(static_cast<const char*>(call.out), 0));
      Scale::template write<Q, T>(call, r, out,
                                  GatedProduct<T, Activated>{activated, x, x + call.width},
                                  next_rows(next, next + call.width, next_out));
    }
  }

  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveSiluAndMulQuant& call) {
    run<T, Fp8>(begin, end, call);
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveFusedQuantKernels, fused_quant) = {
    run_for_types<RmsNormRows<StaticScale>, OpweaveRmsNormQuant>,
    run_for_types<RmsNormRows<ScalePerToken>, OpweaveRmsNormQuant>,
    run_for_types<SiluAndMulRows<StaticScale>, OpweaveSiluAndMulQuant>,
    run_for_types<SiluAndMulRows<ScalePerToken>, OpweaveSiluAndMulQuant>,
    run_for_type<SiluAndMulRows<ScalePerGroup>, OpweaveSiluAndMulQuant>,
};
