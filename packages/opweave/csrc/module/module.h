// The header of the integration files: one file per op family, with any number of ops.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/rows.h"
#include "core/view.h"
#include "kernels/kernels.h"

namespace opweave {

// Return the selected kernels. Throws if OPWEAVE_ISA requests unsupported ones.
inline const OpweaveKernels& active_kernels() {
  const OpweaveKernels* kernels = opweave_kernels();
  if (kernels == nullptr) throw CheckFailed(opweave_isa_error());
  return *kernels;
}

}  // namespace opweave
