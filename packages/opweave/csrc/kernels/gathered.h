// Look up the results of a function of 16-bit numbers in a table, with gather instructions.
//
// CPUs with AMX gather 16 numbers from the L1 cache in nine cycles, half the time of single loads.
// The entries of the most frequent numbers fit there.
#pragma once

#include "kernels/load_pairs.h"
#include "kernels/prefetch.h"

namespace {

template <class T>
struct Gathered;

#if !defined(__AMX_BF16__)

constexpr bool kGathers = false;

#endif

}  // namespace

#if defined(__AMX_BF16__)
#include "kernels/isa/gathered_amx.h"
#endif

namespace {

// Whether this is also faster than computing an activation that is multiplied afterwards: float16
// results are multiplied without conversion.
template <class T>
constexpr bool kGathersFaster = false;
template <>
constexpr bool kGathersFaster<BFloat16> = kGathers;

}  // namespace
