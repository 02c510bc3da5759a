// The plain C interface of the kernels: no torch, no Python, no C++ types cross it.
//
// A kernel processes the rows [begin, end) of one call and nothing else, so whoever calls it owns
// the parallel loop. A row's result depends on that row alone.
#pragma once

#include <stddef.h>
#include <stdint.h>

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

// Every kernel family, compiled for one instruction set.
struct OpweaveKernels {
  const char* isa;
  const struct OpweaveNormKernels* norm;
  const struct OpweaveRotaryKernels* rotary;
  const struct OpweaveQuantKernels* quant;
  const struct OpweaveActivationKernels* activation;
  const struct OpweaveFusedQuantKernels* fused_quant;
  const struct OpweavePagedAttentionKernels* paged_attention;
  const struct OpweaveLayerNormKernels* layer_norm;
  const struct OpweaveGatedNormKernels* gated_norm;
};

// The kernels in use, or null if the instruction set asked for cannot be used.
const struct OpweaveKernels* opweave_kernels(void);

// Why opweave_kernels() is null, else null.
const char* opweave_isa_error(void);

// Use `isa` from now on; null picks the best one. Returns null, or why that is impossible (the
// kernels in use then stay as they were).
const char* opweave_select_isa(const char* isa);

// The i-th best instruction set that this CPU can run, or null past the last one.
const char* opweave_available_isa(size_t i);

#ifdef __cplusplus
}
#endif
