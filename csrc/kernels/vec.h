// The vector layer of the kernels: everything computes in float32 lanes, whatever the storage type.
//
// Each vec_*.h defines, in an anonymous namespace:
//   Vec, kLanes           a vector of float32 lanes
//   splat, add, sub, mul, div, fma  lane-wise arithmetic, rounded to nearest even
//   min, max              of two lanes; the second one if either is NaN
//   negative_abs          -|a|
//   with_sign             the magnitude of a with the sign of b
//   less, at_most, select  a < b and a <= b per lane; condition ? a : b per lane
//   keep                  the lanes of a part, the others zero
//   ratio                 a / b for 1 <= b, within two units in the last place; 0 for a finite a and
//                         an infinite b
//   scale_by_power        a * 2^n for an integral n in [-160, 130], rounded once
//   power_of_bits(v)      2^(n - 127) for the lowest eight bits n of v, zero for n = 0, if the
//                         ninth is not set: it would be the sign
//   Exponent(x)           x as an integer n and a fraction: raise(p) is 2^x, where p is kPolynomial
//                         of the fraction, within 2^-18; 0 from -126 down (or denormals), infinity
//                         above float32
//   sum                   the sum over lanes, in a fixed order
//   Lanes<T>              load, store and round for storage type T; round(v) may lose a NaN that
//                         was read from float32, and round_any(v) loses none; in fewer steps,
//                         round_moderate(v) is for |v| < 2^111, and rounds what is denormal to more
//                         digits, and round_inexact(v) for v that an approximation has made: ties
//                         go away from zero; stored(v) is what a store and a load make of v: as
//                         round_any, but denormals may become zero
// A load or store takes Full{} for kLanes elements or Tail{n} for the first n of them; lanes past
// the tail load as zero and are never written.
//
// Only functions with internal linkage may appear here: one that the linker may share between
// instruction sets (an inline function of the standard library, say) could put AVX-512 code on the
// path of a CPU without it. A test audits the object files for such symbols.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels/unroll.h"

namespace {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Of all processors with AVX512-BF16 only Zen 4, Zen 5 and Cooper Lake have no AMX.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kIsZen = true;
#else
constexpr bool kIsZen = false;
#endif

struct Full {};

struct Tail {
  int64_t count;
};

// Parts of 2 * kLanes elements, with AVX2: those at even places, and those after them.
struct Even {};
struct Odd {};

// Call this before a masked instruction accesses memory: the sanitizer looks into ordinary
// accesses only, so there have to be some.
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
#include "kernels/vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/vec_avx2.h"
#include "kernels/vec_exponent.h"
#else
#include "kernels/vec_generic.h"
#include "kernels/vec_exponent.h"
#endif

namespace {

// The same vector, of which the compiler does not know that it is in memory, too: GCC would read it
// from there again for each use.
template <class V>
inline V in_register(V v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Call visit(i, Full{}) for every whole vector of n elements, then visit(i, Tail{rest}) once.
template <class Visit>
inline void for_each_vec(int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(i, Full{});
  if (i < n) visit(i, Tail{n - i});
}

// What a loop calls at each step of so many elements, for values that make use of it (Paced).
template <int64_t kElements, class Value>
__attribute__((always_inline)) inline void announce(const Value&, int64_t) {}

// Call store(i, value(i, part), part) for every vector, for a value that takes many steps, each on
// the one before: so many of them are begun before the first is stored that their steps overlap.
// value may read what store(i) writes.
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
