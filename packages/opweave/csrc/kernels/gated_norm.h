// The plain C interface of gated RMS normalization; see kernels.h for the rules.
#pragma once

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = rms_norm(x) * weight * act(gate), or rms_norm(x * act(gate)) * weight. Operand 0 of `rows`
// is out, operand 1 is x; both operands of `gate_rows` are the gate, or x without a gate.
// `weight` and `gate` may be null.
struct OpweaveGatedNorm {
  void* out;
  const void* x;
  const void* gate;
  const void* weight;
  struct OpweaveRows rows;
  struct OpweaveRows gate_rows;
  int64_t width;
  int64_t group_size;  // a divisor of width; each group is normalized separately
  float epsilon;
  int32_t norm_before_gate;
  int32_t is_sigmoid;  // otherwise silu
  enum OpweaveDtype dtype;
  enum OpweaveDtype weight_dtype;  // dtype or OPWEAVE_FLOAT32
};

struct OpweaveGatedNormKernels {
  OpweaveRangeKernel rms_norm_gated;  // call: OpweaveGatedNorm*
};

#ifdef __cplusplus
}
#endif
