// The tables of all kernel families together, compiled once per instruction set.
#include "kernels/kernels.h"
#include "kernels/table.h"

#define OPWEAVE_TEXT_(name) #name
#define OPWEAVE_TEXT(name) OPWEAVE_TEXT_(name)

// An instruction set that adds tiles to another one has that one's kernels but for what uses tiles.
#ifndef OPWEAVE_ISA_WITHOUT_TILES
#define OPWEAVE_ISA_WITHOUT_TILES OPWEAVE_ISA
#endif
#define OPWEAVE_OTHER_TABLE(name) OPWEAVE_TABLE_OF(name, OPWEAVE_ISA_WITHOUT_TILES)
#define OPWEAVE_OWN_TABLE(name) OPWEAVE_TABLE_OF(name, OPWEAVE_ISA)

extern "C" {
#define OPWEAVE_FAMILY(name, Table) extern const struct Table OPWEAVE_OTHER_TABLE(name);
#define OPWEAVE_TILED_FAMILY(name, Table) extern const struct Table OPWEAVE_OWN_TABLE(name);
#include "kernels/families.inc"
}

OPWEAVE_KERNEL_TABLE(OpweaveKernels, all) = {
    OPWEAVE_TEXT(OPWEAVE_ISA),
#define OPWEAVE_FAMILY(name, Table) &OPWEAVE_OTHER_TABLE(name),
#define OPWEAVE_TILED_FAMILY(name, Table) &OPWEAVE_OWN_TABLE(name),
#include "kernels/families.inc"
};
