// The vector layer of the kernels: computations are in float32 lanes for every storage type.
//
// Each of isa/vec_{avx512,avx2,generic}.h defines, in an anonymous namespace:
//   Vec, kLanes           a vector of float32 lanes
//   splat, add, sub, mul, div, fma  lane-wise arithmetic, rounded to nearest even
//   min, max              of two lanes; the second one if either is NaN
//   negative_abs          -|a|
//   with_sign             the magnitude of a with the sign of b
//   less, at_most, select  a < b and a <= b per lane; condition ? a : b per lane
//   keep                  the lanes of a part; the other lanes become zero
//   ratio                 a / b for b >= 1, within 2 ulp; 0 for a finite a and an infinite b
//   scale_by_power        a * 2^n for an integral n in [-160, 130], rounded once
//   power_of_bits(v)      2^(n - 127), where n is the lowest eight bits of v; zero for n = 0. The
//                         ninth bit must be zero, because it would become the sign
//   Exponent(x)           splits x into an integer and a fraction: raise(p) is 2^x within 2^-18,
//                         where p is kPolynomial of the fraction; 0 (or denormal) below -126,
//                         infinity above the range of float32
//   sum                   the sum over lanes, in a fixed order
//   sums                  lane i is the sum over the lanes of v[i], added in one order for every i
//   kSumOrder             that order: entries 0 and 1 are added, 2 and 3, and so on, then the sums
//                         likewise
//   store_sums            the sum of each of four vectors, bitwise equal to sum
//   largest               the largest lane; unspecified if some lanes are NaN
//   transpose             lane i of vector k becomes lane k of vector i. With AVX-512, also for
//                         integers
//   Lanes<T>              load, store and round for storage type T:
//                           round(v) may lose a NaN that was read from float32
//                           round_any(v) preserves every NaN
//                           round_moderate(v) is faster, for |v| < 2^111; it rounds denormals to
//                           more digits
//                           round_inexact(v) is faster, for approximate v; ties round away from 0
//                           stored(v) is the result of a store and a load: like round_any, but
//                           denormals may become zero
// Loads and stores take Full{} for kLanes elements, or Tail{n} for the first n; lanes past the tail
// load as zero and are not written.
//
// Only functions with internal linkage are allowed here: the linker may merge others (such as
// inline functions of the standard library) between instruction sets, and a CPU could execute
// AVX-512 code that it does not support. A test checks the object files for such symbols.
//
// This file, vec_math.h and their includes are part of the kit for native modules, opweave/simd/.
// They include each other by relative paths, and nothing else of csrc/.
#pragma once

#include <stdint.h>
#include <string.h>

#include "unroll.h"

namespace {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

struct Full {};

struct Tail {
  int64_t count;
};

// Parts of 2 * kLanes elements, with AVX2: the elements at even and at odd positions.
struct Even {};
struct Odd {};

// Access the memory of a masked instruction with ordinary loads, since the sanitizer does not check
// masked ones.
template <class T>
inline void touch([[maybe_unused]] const T* p, [[maybe_unused]] Tail tail) {
#if defined(__SANITIZE_ADDRESS__)
  const volatile char* byte = reinterpret_cast<const volatile char*>(p);
  (void)byte[0];
  (void)byte[static_cast<size_t>(tail.count) * sizeof(T) - 1];
#endif
}

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "isa/vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa/vec_avx2.h"
#include "vec_exponent.h"
#else
#include "isa/vec_generic.h"
#include "vec_exponent.h"
#endif

namespace {

// Hide from the compiler that a vector was loaded from memory: GCC would reload it for each use.
template <class V>
inline V in_register(V v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Call visit(i, Full{}) for every whole vector of n elements, then visit(i, Tail{rest}) if there is
// a rest.
template <class Visit>
inline void for_each_vec(int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(i, Full{});
  if (i < n) visit(i, Tail{n - i});
}

// A hook that loops call at each step of kElements elements; see Paced.
template <int64_t kElements, class Value>
__attribute__((always_inline)) inline void announce(const Value&, int64_t) {}

// Call store(i, value(i, part), part) for every vector. kAtOnce values are computed before the
// first is stored, so that their latencies overlap. value may read what store(i) writes.
constexpr int kAtOnce = 4;

template <class Value, class Store>
inline void map_vecs(int64_t n, Value value, Store store) {
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes) {
    Vec values[kAtOnce];
    announce<kAtOnce * kLanes>(value, i);
    OPWEAVE_UNROLL
    for (int k = 0; k < kAtOnce; ++k) values[k] = value(i + k * kLanes, Full{});
    OPWEAVE_UNROLL
    for (int k = 0; k < kAtOnce; ++k) store(i + k * kLanes, values[k], Full{});
  }
  for (; i + kLanes <= n; i += kLanes) store(i, value(i, Full{}), Full{});
  if (i < n) store(i, value(i, Tail{n - i}), Tail{n - i});
}

}  // namespace
