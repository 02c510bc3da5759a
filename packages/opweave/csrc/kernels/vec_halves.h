// float16 arithmetic with 32 lanes, if the CPU supports it. One instruction replaces two
// conversions, the float32 instruction and a rounding, with bitwise equal results.
#pragma once

#include "kernels/vec.h"

namespace {

// Like Full and Tail, for kHalves elements: value(i, part) then returns Halves.
struct FullHalves {};

struct TailHalves {
  int64_t count;
};

// Whether value(i, part) supports these parts.
template <class Value>
constexpr bool kGivesHalves = false;

// Convert to the vector type of the first argument.
inline Vec like(Vec, Vec v) { return v; }

template <class T>
inline Vec rounded(Vec v) {
  return Lanes<T>::round(v);
}

#if !defined(__AVX512FP16__)

constexpr bool kHasHalves = false;
struct Halves {};

#endif

}  // namespace

#if defined(__AVX512FP16__)
#include "kernels/isa/vec_halves_avx512fp16.h"
#endif
