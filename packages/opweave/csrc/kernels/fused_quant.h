// The plain C interface of norms and activations with quantized results; see kernels.h for the
// rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = quantize(rms_norm(x)), or, with a residual, residual_out = x + residual and
// out = quantize(rms_norm(residual_out)). `rows` walks out and x, `residual_rows` residual_out and
// residual. Static: scales[0] is given; per token: scales[row] is written.
struct OpweaveRmsNormQuant {
  void* out;
  const void* x;
  void* residual_out;    // null without a residual; may be residual or x
  const void* residual;  // null without a residual
  const void* weight;    // may be null
  float* scales;
  struct OpweaveRows rows;
  struct OpweaveRows residual_rows;
  int64_t width;
  float epsilon;
  float upper_bound;  // per token: upper bound for the largest magnitude
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;
  enum OpweaveDtype out_dtype;  // OPWEAVE_FLOAT8_E4M3FN or OPWEAVE_INT8
};

// out[..., i] = quantize(silu(x[..., i]) * x[..., width + i]): operand 0 of `rows` is out, 1 is x.
struct OpweaveSiluAndMulQuant {
  void* out;
  const void* x;
  float* scales;  // as above; for groups, a row of scales per row is written
  struct OpweaveRows rows;
  int64_t width;  // of out
  int64_t group_size;
  int32_t power_of_two;  // for groups: round scales up to powers of two
  float upper_bound;
  enum OpweaveDtype dtype;
  enum OpweaveDtype out_dtype;
};

struct OpweaveFusedQuantKernels {
  OpweaveRangeKernel rms_norm_static;         // call: OpweaveRmsNormQuant*
  OpweaveRangeKernel rms_norm_per_token;      // call: OpweaveRmsNormQuant*
  OpweaveRangeKernel silu_and_mul_static;     // call: OpweaveSiluAndMulQuant*
  OpweaveRangeKernel silu_and_mul_per_token;  // call: OpweaveSiluAndMulQuant*
  OpweaveRangeKernel silu_and_mul_groups;     // call: OpweaveSiluAndMulQuant*, to float8_e4m3fn
};

#ifdef __cplusplus
}
#endif
