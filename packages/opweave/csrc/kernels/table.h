// Defines the table of a kernel family for the instruction set that is being compiled:
//
//   OPWEAVE_KERNEL_TABLE(OpweaveNormKernels, norm) = {rms_norm, fused_add_rms_norm};
#pragma once

#define OPWEAVE_TABLE_OF_(family, isa) opweave_##family##_kernels_##isa
#define OPWEAVE_TABLE_OF(family, isa) OPWEAVE_TABLE_OF_(family, isa)

#define OPWEAVE_KERNEL_TABLE(Table, family)                             \
  extern "C" const Table OPWEAVE_TABLE_OF(family, OPWEAVE_ISA);         \
  const Table OPWEAVE_TABLE_OF(family, OPWEAVE_ISA)
