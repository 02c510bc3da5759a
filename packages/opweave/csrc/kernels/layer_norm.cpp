// Layer norm, compiled once per instruction set. Computes in float32, and rounds once at the end.
#include "kernels/layer_norm.h"

#include "kernels/moments.h"
#include "kernels/prefetch.h"
#include "kernels/rows.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_group.h"

namespace {

struct LayerNormRows {
  template <class T, class W>
  static void run(int64_t begin, int64_t end, const OpweaveLayerNorm& call) {
    const W* weight = static_cast<const W*>(call.weight);
    const W* bias = static_cast<const W*>(call.bias);
    Rows<T> rows(call.rows, call.out, call.x, begin, rows_ahead<T>(call.width));
    for (int64_t r = begin; r < end; ++r, rows.advance()) {
      const T* x = rows.x();
      const auto next = three_walks<true>(
          next_rows_if<kIsFetched<T>>(rows.next_x(), rows.next_out()), call.width);
      const float mean = mean_of(x, call.width, next.quick);
      const float variance = variance_of(x, call.width, mean, next.others.first);
      const Vec means = splat(mean);
      const Vec scale = splat(1.0f / __builtin_sqrtf(variance + call.epsilon));
      const auto value = [=](int64_t i, auto part) {
        const Vec normalized = mul(sub(Lanes<T>::load(x + i, part), means), scale);
        const Vec factor = weight != nullptr ? Lanes<W>::load(weight + i, part) : splat(1);
        const Vec shift = bias != nullptr ? Lanes<W>::load(bias + i, part) : splat(0);
        return fma(normalized, factor, shift);
      };
      store_row<W, 1>(rows.out(), call.width, paced(value, next.others.second));
    }
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveLayerNormKernels, layer_norm) = {
    run_for_weight_type<LayerNormRows, OpweaveLayerNorm>,
};
