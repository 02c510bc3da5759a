// What an integration file includes: one file per op family, each with any number of ops.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/rows.h"
#include "core/view.h"
#include "kernels/kernels.h"

namespace opweave {

// The kernels in use. Throws if OPWEAVE_ISA asked for some that cannot be used.
inline const OpweaveKernels& active_kernels() {
  const OpweaveKernels* kernels = opweave_kernels();
  if (kernels == nullptr) throw CheckFailed(opweave_isa_error());
  return *kernels;
}

}  // namespace opweave
