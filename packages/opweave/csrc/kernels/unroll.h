// Unrolls the following loop early enough that an array indexed by its counter is kept in
// registers. GCC's automatic unrolling comes too late for that, and so may inlining.
#pragma once

#define OPWEAVE_UNROLL _Pragma("GCC unroll 16")
#define OPWEAVE_INLINE __attribute__((always_inline)) inline
