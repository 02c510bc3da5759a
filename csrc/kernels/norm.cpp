// RMS normalisation, compiled once per instruction set.
//
// The rounding is part of the op's definition: normalise in float32, round to the weight's type,
// multiply, round to the weight's type, round to x's type.
#include "kernels/kernels.h"
#include "kernels/rms.h"
#include "kernels/row_cursor.h"

namespace {

template <class T, class W>
void rms_norm_rows(int64_t begin, int64_t end, const OpweaveRmsNorm& call) {
  const W weight(call.weight);
  RowCursor row(call.rows, begin);
  for (int64_t r = begin; r < end; ++r, row.advance()) {
    T* out = reinterpret_cast<T*>(row.in(static_cast<char*>(call.out), 0));
    const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
    const float squares = sum_of_squares(
        call.width, [=](int64_t i, auto part) { return Lanes<T>::load(x + i, part); });
    write_normalised(out, x, weight, inverse_rms(squares, call.width, call.epsilon), call.width);
  }
}

template <class T, class W>
void fused_add_rms_norm_rows(int64_t begin, int64_t end, const OpweaveFusedAddRmsNorm& call) {
  const W weight(call.weight);
  RowCursor row(call.rows, begin);
  for (int64_t r = begin; r < end; ++r, row.advance()) {
    T* x = reinterpret_cast<T*>(row.in(static_cast<char*>(call.x), 0));
    T* residual = reinterpret_cast<T*>(row.in(static_cast<char*>(call.residual), 1));
    const float squares = sum_of_squares(call.width, [=](int64_t i, auto part) {
      const Vec exact = add(Lanes<T>::load(x + i, part), Lanes<T>::load(residual + i, part));
      const Vec stored = Lanes<T>::round(exact);  // the norm sees the sum as it is stored
      Lanes<T>::store(residual + i, stored, part);
      return stored;
    });
    const float scale = inverse_rms(squares, call.width, call.epsilon);
    write_normalised(x, static_cast<const T*>(residual), weight, scale, call.width);
  }
}

struct RmsNormRows {
  template <class T, class W, class Call>
  static void run(int64_t begin, int64_t end, const Call& call) {
    rms_norm_rows<T, W>(begin, end, call);
  }
};

struct FusedAddRmsNormRows {
  template <class T, class W, class Call>
  static void run(int64_t begin, int64_t end, const Call& call) {
    fused_add_rms_norm_rows<T, W>(begin, end, call);
  }
};

template <class Rows, class T, class Call>
void run_for_weight(int64_t begin, int64_t end, const Call& call) {
  if (call.weight == nullptr) {
    Rows::template run<T, NoWeight>(begin, end, call);
  } else if (call.weight_dtype == OPWEAVE_FLOAT32) {
    Rows::template run<T, Weight<float>>(begin, end, call);
  } else {
    Rows::template run<T, Weight<T>>(begin, end, call);
  }
}

template <class Rows, class Call>
void run(int64_t begin, int64_t end, void* erased) {
  const Call& call = *static_cast<const Call*>(erased);
  switch (call.dtype) {
    case OPWEAVE_FLOAT32: return run_for_weight<Rows, float>(begin, end, call);
    case OPWEAVE_BFLOAT16: return run_for_weight<Rows, BFloat16>(begin, end, call);
    case OPWEAVE_FLOAT16: return run_for_weight<Rows, Float16>(begin, end, call);
    default: return;  // the callers admit no other type
  }
}

}  // namespace

#define OPWEAVE_JOIN_(a, b) a##b
#define OPWEAVE_JOIN(a, b) OPWEAVE_JOIN_(a, b)
#define OPWEAVE_TABLE OPWEAVE_JOIN(opweave_norm_kernels_, OPWEAVE_ISA)

extern "C" {
extern const OpweaveNormKernels OPWEAVE_TABLE;
const OpweaveNormKernels OPWEAVE_TABLE = {
    run<RmsNormRows, OpweaveRmsNorm>,
    run<FusedAddRmsNormRows, OpweaveFusedAddRmsNorm>,
};
}
