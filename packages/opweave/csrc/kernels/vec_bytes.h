// 8-bit weights as float32 lanes: int8, and float8_e4m3fn in units of kUnit<Float8>.
//   Lanes<T>::load  kLanes weights, as for other types
//   load_two        2 * kLanes weights, of any type
//
// float8_e4m3fn has the layout of the upper byte of float16 with one exponent bit less. Shifted to
// the fields of float16, a code represents 2^-8 of its value, including denormals. Only NaN, the
// code above the largest number, needs float16's exponent of NaN.
#pragma once

#include "kernels/vec.h"

namespace {

struct Float8 {
  uint8_t bits;
};

template <class W>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Float8> = 256.0f;

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/vec_bytes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/isa/vec_bytes_avx2.h"
#else
#include "kernels/isa/vec_bytes_generic.h"
#endif

namespace {

template <>
struct Lanes<int8_t> {
  template <class Part>
  static Vec load(const int8_t* p, Part part) {
    return widen_bytes(load_bytes(p, part), int8_t{});
  }
};

template <>
struct Lanes<Float8> {
  template <class Part>
  static Vec load(const Float8* p, Part part) {
    return widen_bytes(load_bytes(p, part), Float8{});
  }
};

template <class T>
inline void load_two(Vec (&to)[2], const T* from) {
  to[0] = Lanes<T>::load(from, Full{});
  to[1] = Lanes<T>::load(from + kLanes, Full{});
}

}  // namespace
