// Unrolls the loop that follows, early enough for an array that its counter indexes to be
// registers: loops that GCC unrolls on its own it unrolls later, and keeps the array in memory, too.
#pragma once

#define OPWEAVE_UNROLL _Pragma("GCC unroll 16")
