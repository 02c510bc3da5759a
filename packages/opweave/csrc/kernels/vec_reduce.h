// Reductions over lanes:
//   sums     lane i is the sum over the lanes of v[i], added in one order for every i
//   kSumOrder  that order: entries 0 and 1 are added, 2 and 3, and so on, then the sums likewise
//   store_sums  the sum of each of four vectors, bitwise equal to sum
//   largest  the largest lane; unspecified if some lanes are NaN
#pragma once

#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "isa/vec_reduce_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa/vec_reduce_avx2.h"
#else
#include "isa/vec_reduce_generic.h"
#endif
