// Norms and activations with quantized results, compiled once per instruction set.
//
// The result is rounded to the type of x before it is quantized.
#include "kernels/fused_quant.h"

#include "kernels/quant_row.h"
#include "kernels/result_table.h"
#include "kernels/rms.h"
#include "kernels/rows.h"
#include "kernels/table.h"
#include "kernels/vec_math.h"

namespace {

// Quantization of the values of a row, one class per kind of scale.
struct StaticScale {
  // Whether quantizing a row takes as long as computing it.
  template <class T>
  static constexpr bool kOutlastsNorm = false;
  template <class T>
  static constexpr bool kOutlastsSilu = false;

  template <class Q, class T, class Call, class Value, class Ahead>
  static void write(const Call& call, int64_t, typename Q::Storage* out, Value value, Ahead next) {
    quantize_static<Q, T>(out, call.width, *call.scales, value, next);
  }
};

struct ScalePerToken {
  template <class T>
  static constexpr bool kOutlastsNorm = sizeof(T) == sizeof(float);
  template <class T>
  static constexpr bool kOutlastsSilu = false;

  template <class Q, class T, class Call, class Value, class Ahead>
  static void write(const Call& call, int64_t row, typename Q::Storage* out, Value value,
                    Ahead next) {
    call.scales[row] = quantize_dynamic<Q, T>(out, call.width, call.upper_bound, value, next);
  }
};

struct ScalePerGroup {
  template <class T>
  static constexpr bool kOutlastsSilu = sizeof(T) == sizeof(uint16_t);

  template <class Q, class T, class Call, class Value, class Ahead>
  static void write(const Call& call, int64_t row, uint8_t* out, Value value, Ahead next) {
    const int64_t groups = (call.width + call.group_size - 1) / call.group_size;
    quantize_groups<T>(out, call.scales + row * groups, call.width, call.group_size,
                       call.power_of_two != 0, value, next);
  }
};

// Return the prefetches in the passes over n elements after a sum.
template <bool kFirstIsLong, class Read, class Written>
inline auto after_sum(Read next, Written out, int64_t n) {
  const auto written = two_walks<kFirstIsLong>(out, n);
  return walks(walks(next.first, written.first), walks(next.second, written.second));
}

template <class Scale>
struct RmsNormRows {
  template <class T, class Q>
  static void run(int64_t begin, int64_t end, const OpweaveRmsNormQuant& call) {
    with_weight_of<T>(call, end - begin, [&](auto weight) {
      if (call.residual == nullptr) {
        write_rows<T, Q>(begin, end, call, weight);
      } else {
        add_and_write_rows<T, Q>(begin, end, call, weight);
      }
    });
  }

 private:
  template <class T, class Q, class W>
  static void write_rows(int64_t begin, int64_t end, const OpweaveRmsNormQuant& call, W weight) {
    Rows<T, typename Q::Storage> rows(call.rows, call.out, call.x, begin,
                                      rows_ahead<T>(call.width));
    for (int64_t r = begin; r < end; ++r, rows.advance()) {
      constexpr bool kInSum = sizeof(T) == sizeof(float);  // up to 3 % slower with 16 bits
      constexpr bool kFirstIsLong = !Scale::template kOutlastsNorm<T>;
      const auto next = three_walks<kInSum, kFirstIsLong>(next_rows(rows.next_x()), call.width);
      const float squares = sum_of_squares(rows.x(), call.width, next.quick);
      write<Q>(call, r, rows.out(), rows.x(), squares, weight,
               after_sum<kFirstIsLong>(next.others, next_rows(rows.next_out()), call.width));
    }
  }

  template <class T, class Q, class W>
  static void add_and_write_rows(int64_t begin, int64_t end, const OpweaveRmsNormQuant& call,
                                 W weight) {
    Rows<T, typename Q::Storage> rows(call.rows, call.out, call.x, begin);
    Rows<T> sums(call.residual_rows, call.residual_out, call.residual, begin);
    for (int64_t r = begin; r < end; ++r, rows.advance(), sums.advance()) {
      constexpr bool kIsWanted = !kFollowsRows<T>;
      const auto next =
          three_walks<true>(next_rows_if<kIsWanted>(rows.next_x(), sums.next_x()), call.width);
      const float squares =
          add_and_sum_squares(sums.out(), rows.x(), sums.x(), call.width, next.quick);
      const T* sum = sums.out();
      write<Q>(call, r, rows.out(), sum, squares, weight,
               after_sum<false>(next.others, next_rows_if<kIsWanted>(rows.next_out()), call.width));
    }
  }

  template <class Q, class T, class W, class Ahead>
  static void write(const OpweaveRmsNormQuant& call, int64_t row, typename Q::Storage* out,
                    const T* x, float squares, W weight, Ahead next) {
    const float scale = inverse_rms(squares, call.width, call.epsilon);
    Scale::template write<Q, T>(call, row, out, normalized(x, weight, scale), next);
  }
};

template <class Scale>
struct SiluAndMulRows {
  template <class T, class Q>
  static void run(int64_t begin, int64_t end, const OpweaveSiluAndMulQuant& call) {
    constexpr bool kMayLookUp = !kGathers || kGathersFaster<T>;
    with_rounded<T, kMayLookUp>(Silu<T>{}, (end - begin) * call.width, [&](auto activated) {
      run_activated<T, Q>(begin, end, call, activated);
    });
  }

  template <class T, class Q, class Activated>
  static void run_activated(int64_t begin, int64_t end, const OpweaveSiluAndMulQuant& call,
                            Activated activated) {
    Rows<T, typename Q::Storage> rows(call.rows, call.out, call.x, begin);
    for (int64_t r = begin; r < end; ++r, rows.advance()) {
      const T* x = rows.x();
      const T* next = rows.next_x();
      const auto ahead = next_rows(next, next + call.width, rows.next_out());
      Scale::template write<Q, T>(call, r, rows.out(),
                                  GatedProduct<T, Activated>{activated, x, x + call.width},
                                  two_walks<!Scale::template kOutlastsSilu<T>>(ahead, call.width));
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
