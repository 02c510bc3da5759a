// Layer normalisation, compiled once per instruction set. In float32, rounded once at the end.
#include "kernels/layer_norm.h"

#include "kernels/kernels.h"
#include "kernels/row_cursor.h"
#include "kernels/row_sum.h"

namespace {

template <class T>
struct Row {
  const T* x;
  int64_t width;

  float mean() const {
    const T* values = x;
    return sum_of_values(width, [=](int64_t i, auto part) {
             return Lanes<T>::load(values + i, part);
           }) / static_cast<float>(width);
  }

  // A second pass: the mean of the squares less the square of the mean could lose every digit.
  float variance(float mean) const {
    const T* values = x;
    const Vec means = splat(mean);
    return sum_of_values(width, [=](int64_t i, auto part) {
             const Vec centred = keep(sub(Lanes<T>::load(values + i, part), means), part);
             return mul(centred, centred);
           }) / static_cast<float>(width);
  }
};

template <class T, class W>
void layer_norm_rows(int64_t begin, int64_t end, const OpweaveLayerNorm& call) {
  const W* weight = static_cast<const W*>(call.weight);
  const W* bias = static_cast<const W*>(call.bias);
  RowCursor cursor(call.rows, begin);
  for (int64_t r = begin; r < end; ++r, cursor.advance()) {
    T* out = reinterpret_cast<T*>(cursor.in(static_cast<char*>(call.out), 0));
    const T* x = reinterpret_cast<const T*>(cursor.in(static_cast<const char*>(call.x), 1));
    const Row<T> row{x, call.width};
    const float mean = row.mean();
    const Vec means = splat(mean);
    const Vec scale = splat(1.0f / __builtin_sqrtf(row.variance(mean) + call.epsilon));
    for_each_vec(call.width, [=](int64_t i, auto part) {
      const Vec normalised = mul(sub(Lanes<T>::load(x + i, part), means), scale);
      const Vec factor = weight != nullptr ? Lanes<W>::load(weight + i, part) : splat(1);
      const Vec shift = bias != nullptr ? Lanes<W>::load(bias + i, part) : splat(0);
      Lanes<T>::store(out + i, fma(normalised, factor, shift), part);
    });
  }
}

template <class T>
void run_for_weight(int64_t begin, int64_t end, const OpweaveLayerNorm& call) {
  if (call.weight_dtype == OPWEAVE_FLOAT32) return layer_norm_rows<T, float>(begin, end, call);
  layer_norm_rows<T, T>(begin, end, call);
}

void layer_norm(int64_t begin, int64_t end, void* erased) {
  const auto& call = *static_cast<const OpweaveLayerNorm*>(erased);
  switch (call.dtype) {
    case OPWEAVE_FLOAT32: return run_for_weight<float>(begin, end, call);
    case OPWEAVE_BFLOAT16: return run_for_weight<BFloat16>(begin, end, call);
    case OPWEAVE_FLOAT16: return run_for_weight<Float16>(begin, end, call);
    default: return;  // the callers admit no other type
  }
}

}  // namespace

#define OPWEAVE_JOIN_(a, b) a##b
#define OPWEAVE_JOIN(a, b) OPWEAVE_JOIN_(a, b)
#define OPWEAVE_TABLE OPWEAVE_JOIN(opweave_layer_norm_kernels_, OPWEAVE_ISA)

extern "C" {
extern const OpweaveLayerNormKernels OPWEAVE_TABLE;
const OpweaveLayerNormKernels OPWEAVE_TABLE = {layer_norm};
}
