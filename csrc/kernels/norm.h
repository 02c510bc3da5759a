// The plain C interface of RMS normalisation; see kernels.h for the rules.
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

// residual += x; x = rms_norm(residual): operand 0 of `rows` is x, operand 1 is residual.
struct OpweaveFusedAddRmsNorm {
  void* x;
  void* residual;
  const void* weight;
  struct OpweaveRows rows;
  int64_t width;
  float epsilon;
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;
};

struct OpweaveNormKernels {
  OpweaveRangeKernel rms_norm;            // call: OpweaveRmsNorm*
  OpweaveRangeKernel fused_add_rms_norm;  // call: OpweaveFusedAddRmsNorm*
};

#ifdef __cplusplus
}
#endif
