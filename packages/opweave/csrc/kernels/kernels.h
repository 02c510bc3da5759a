// The plain C interface of the kernels, without torch, Python or C++ types.
//
// A kernel processes the rows [begin, end) of one call; the caller runs the parallel loop. The
// result of a row depends only on that row.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// All kernel families, compiled for one instruction set.
struct OpweaveKernels {
  const char* isa;
#define OPWEAVE_FAMILY(name, Table) const struct Table* name;
#include "kernels/families.inc"
};

// Return the selected kernels, or null if the requested instruction set is not available.
const struct OpweaveKernels* opweave_kernels(void);

// Return why opweave_kernels() is null, or null.
const char* opweave_isa_error(void);

// Select `isa`, or the best instruction set if null. Returns null, or an error message; the
// selection is then unchanged.
const char* opweave_select_isa(const char* isa);

// Return the i-th best instruction set that this CPU supports, or null past the last one.
const char* opweave_available_isa(size_t i);

#ifdef __cplusplus
}
#endif
