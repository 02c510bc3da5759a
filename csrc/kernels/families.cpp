// The tables of all kernel families together, compiled once per instruction set.
#include "kernels/kernels.h"
#include "kernels/table.h"

#define OPWEAVE_TEXT_(name) #name
#define OPWEAVE_TEXT(name) OPWEAVE_TEXT_(name)

extern "C" {
#define OPWEAVE_FAMILY(name, Table) extern const struct Table OPWEAVE_TABLE_OF(name, OPWEAVE_ISA);
#include "kernels/families.inc"
}

OPWEAVE_KERNEL_TABLE(OpweaveKernels, all) = {
    OPWEAVE_TEXT(OPWEAVE_ISA),
#define OPWEAVE_FAMILY(name, Table) &OPWEAVE_TABLE_OF(name, OPWEAVE_ISA),
#include "kernels/families.inc"
};
