// 8-bit weights as float32 lanes with the vector types of GCC and Clang; see vec_bytes.h.
#pragma once

#include "kernels/vec.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(4)));
typedef int8_t SignedBytes __attribute__((vector_size(4)));

inline Bytes load_bytes(const void* p, Full) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return bytes;
}

inline Bytes load_bytes(const void* p, Tail tail) {
  Bytes bytes = {};
  memcpy(&bytes, p, static_cast<size_t>(tail.count));
  return bytes;
}

inline Vec widen_bytes(Bytes bytes, int8_t) {
  return __builtin_convertvector(reinterpret_cast<SignedBytes>(bytes), Vec);
}

inline Vec widen_bytes(Bytes bytes, Float8) {
  const Bits code = __builtin_convertvector(bytes, Bits);
  const Bits half = ((code & splat_bits(0x7f)) << 7) | ((code & splat_bits(0x80)) << 8);
  return widen(half | ((half + splat_bits(0x80)) & splat_bits(0x4000)), Float16{});
}

}  // namespace
