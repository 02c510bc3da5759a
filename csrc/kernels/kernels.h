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

// Every kernel family, compiled for one instruction set.
struct OpweaveKernels {
  const char* isa;
#define OPWEAVE_FAMILY(name, Table) const struct Table* name;
#include "kernels/families.inc"
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
