// The plain C interface of RMS normalization; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = rms_norm(x): operand 0 of `rows` is out, operand 1 is x. `weight` may be null.
struct OpweaveRmsNorm {
  void* out;
  const void* x;
  const void* weight;
  struct OpweaveRows rows;
  int64_t width;
  float epsilon;
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;
};

// sum = x + residual; out = rms_norm(sum). The operands of `rows` are out and x, those of
// `sum_rows` are sum and residual. out may be x, and sum may be residual.
struct OpweaveAddRmsNorm {
  void* out;
  void* sum;
  const void* x;
  const void* residual;
  const void* weight;
  struct OpweaveRows rows;
  struct OpweaveRows sum_rows;
  int64_t width;
  float epsilon;
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;
};

struct OpweaveNormKernels {
  OpweaveRangeKernel rms_norm;      // call: OpweaveRmsNorm*
  OpweaveRangeKernel add_rms_norm;  // call: OpweaveAddRmsNorm*
};

#ifdef __cplusplus
}
#endif
