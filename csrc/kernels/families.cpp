// The table of all kernel families, compiled once per instruction set.
#include "kernels/kernels.h"
#include "kernels/table.h"

#define OPWEAVE_TEXT_(name) #name
#define OPWEAVE_TEXT(name) OPWEAVE_TEXT_(name)

// An instruction set that extends another one reuses its kernels, except those of the families that
// use the extension.
#ifndef OPWEAVE_ISA_ADDED_TO
#define OPWEAVE_ISA_ADDED_TO OPWEAVE_ISA
#endif
#define OPWEAVE_OTHER_TABLE(name) OPWEAVE_TABLE_OF(name, OPWEAVE_ISA_ADDED_TO)
#define OPWEAVE_OWN_TABLE(name) OPWEAVE_TABLE_OF(name, OPWEAVE_ISA)

extern "C" {
#define OPWEAVE_FAMILY(name, Table) extern const struct Table OPWEAVE_OTHER_TABLE(name);
#define OPWEAVE_AMX_FAMILY(name, Table) extern const struct Table OPWEAVE_OWN_TABLE(name);
#include "kernels/families.inc"
}

OPWEAVE_KERNEL_TABLE(OpweaveKernels, all) = {
    OPWEAVE_TEXT(OPWEAVE_ISA),
#define OPWEAVE_FAMILY(name, Table) &OPWEAVE_OTHER_TABLE(name),
#define OPWEAVE_AMX_FAMILY(name, Table) &OPWEAVE_OWN_TABLE(name),
#include "kernels/families.inc"
};
