// The types that kernels share with their callers, in plain C.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum OpweaveDtype {
  OPWEAVE_FLOAT32,
  OPWEAVE_BFLOAT16,
  OPWEAVE_FLOAT16,
  OPWEAVE_FLOAT64,
  OPWEAVE_INT8,
  OPWEAVE_INT16,
  OPWEAVE_INT32,
  OPWEAVE_INT64,
  OPWEAVE_UINT8,
  OPWEAVE_BOOL,
  OPWEAVE_FLOAT8_E4M3FN,
  OPWEAVE_OTHER_DTYPE,
};

#define OPWEAVE_MAX_RANK 8
#define OPWEAVE_MAX_ROW_OPERANDS 2

// The rows of up to two operands with the same shape. Dimension 0 is the innermost; dimensions that
// are contiguous for all operands are merged.
struct OpweaveRows {
  int64_t count;
  int32_t rank;
  int64_t sizes[OPWEAVE_MAX_RANK];
  int64_t byte_strides[OPWEAVE_MAX_ROW_OPERANDS][OPWEAVE_MAX_RANK];
};

// Processes the rows [begin, end) of `call`. The caller runs the parallel loop.
typedef void (*OpweaveRangeKernel)(int64_t begin, int64_t end, void* call);

#ifdef __cplusplus
}
#endif
