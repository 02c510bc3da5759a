// The functions of vec_math.h, and the ways to round, over arrays, for test_vec_math.py, which
// compiles this file once per instruction set.
#include "kernels/vec_math.h"

namespace {

template <class Function>
void apply(float* out, const float* x, int64_t n, Function function) {
  for_each_vec(n, [=](int64_t i, auto part) {
    Lanes<float>::store(out + i, function(Lanes<float>::load(x + i, part)), part);
  });
}

}  // namespace

#define OPWEAVE_EXPORT_ROUNDING(function)                                            \
  extern "C" void vec_##function##_bfloat16(float* out, const float* x, int64_t n) { \
    apply(out, x, n, [](Vec v) { return Lanes<BFloat16>::function(v); });            \
  }                                                                                  \
  extern "C" void vec_##function##_float16(float* out, const float* x, int64_t n) {  \
    apply(out, x, n, [](Vec v) { return Lanes<Float16>::function(v); });             \
  }

OPWEAVE_EXPORT_ROUNDING(round)
OPWEAVE_EXPORT_ROUNDING(round_any)
OPWEAVE_EXPORT_ROUNDING(round_inexact)
OPWEAVE_EXPORT_ROUNDING(round_moderate)

#define OPWEAVE_EXPORT(function)                                          \
  extern "C" void vec_##function(float* out, const float* x, int64_t n) { \
    apply(out, x, n, [](Vec v) { return function(v); });                  \
  }

extern "C" void vec_ratio(float* out, const float* b, int64_t n, float a) {
  apply(out, b, n, [=](Vec v) { return ratio(splat(a), v); });
}

OPWEAVE_EXPORT(exp)
OPWEAVE_EXPORT(exp_of_negative)
OPWEAVE_EXPORT(expm1)
OPWEAVE_EXPORT(sigmoid)
OPWEAVE_EXPORT(tanh)
OPWEAVE_EXPORT(erf)
OPWEAVE_EXPORT(rough_exp2)
OPWEAVE_EXPORT(rough_sigmoid)
OPWEAVE_EXPORT(rough_tanh)
OPWEAVE_EXPORT(rough_normal)
