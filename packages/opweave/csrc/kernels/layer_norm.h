// The plain C interface of layer normalization; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// Operand 0 of `rows` is out, operand 1 is x. `weight` and `bias` may be null.
struct OpweaveLayerNorm {
  void* out;
  const void* x;
  const void* weight;
  const void* bias;
  struct OpweaveRows rows;
  int64_t width;
  float epsilon;
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;  // of the bias too: dtype or OPWEAVE_FLOAT32
};

struct OpweaveLayerNormKernels {
  OpweaveRangeKernel layer_norm;  // call: OpweaveLayerNorm*
};

#ifdef __cplusplus
}
#endif
