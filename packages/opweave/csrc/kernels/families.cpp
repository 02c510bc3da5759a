// The table of all kernel families, compiled once per level.
#include "kernels/kernels.h"
#include "kernels/table.h"

#define OPWEAVE_TEXT_(name) #name
#define OPWEAVE_TEXT(name) OPWEAVE_TEXT_(name)

// The build defines OPWEAVE_LEVEL_OF_<family>: this level or, if it extends another one and does
// not compile the family, that level.
#define OPWEAVE_FAMILY_TABLE(name) OPWEAVE_TABLE_OF(name, OPWEAVE_LEVEL_OF_##name)

extern "C" {
#define OPWEAVE_FAMILY(name, Table) extern const struct Table OPWEAVE_FAMILY_TABLE(name);
#include "kernels/families.inc"
}

OPWEAVE_KERNEL_TABLE(OpweaveKernels, all) = {
    OPWEAVE_TEXT(OPWEAVE_ISA),
#define OPWEAVE_FAMILY(name, Table) &OPWEAVE_FAMILY_TABLE(name),
#include "kernels/families.inc"
};
