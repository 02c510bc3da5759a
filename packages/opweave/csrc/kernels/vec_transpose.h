// transpose: lane i of vector k becomes lane k of vector i. With AVX-512, also for integers.
#pragma once

#include "kernels/vec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/vec_transpose_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/isa/vec_transpose_avx2.h"
#else
#include "kernels/isa/vec_transpose_generic.h"
#endif
