// The vector operations of quantization with the vector types of GCC and Clang; see vec_quant.h.
#pragma once

#include "kernels/vec.h"

namespace {

typedef uint16_t Words __attribute__((vector_size(2 * kWords)));

inline Words larger_words(Words a, Words b) { return a > b ? a : b; }

inline Words load_magnitudes(const void* p, Full) {
  Words words;
  memcpy(&words, p, sizeof(words));
  return words & 0x7fff;
}

inline Words load_magnitudes(const void* p, Tail tail) {
  Words words = {};
  memcpy(&words, p, static_cast<size_t>(tail.count) * sizeof(uint16_t));
  return words & 0x7fff;
}

inline uint16_t largest_word(Words words) {
  uint16_t most = words[0];
  for (int k = 1; k < kWords; ++k) most = words[k] > most ? words[k] : most;
  return most;
}

template <class T>
inline float float_of(T value) {
  return Lanes<T>::load(&value, Tail{1})[0];
}

struct CodeBytes {
  uint8_t values[kAtOnce * kLanes];
};

// Return the low byte of every lane of lanes(k).
template <class LanesOf>
inline CodeBytes low_bytes(LanesOf lanes) {
  typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));
  CodeBytes bytes;
  for (int k = 0; k < kAtOnce; ++k) {
    const ByteLanes low = __builtin_convertvector(lanes(k), ByteLanes);
    memcpy(bytes.values + k * kLanes, &low, sizeof(low));
  }
  return bytes;
}

inline Vec larger_magnitude(Vec so_far, Vec v) {
  const Bits old = bits_of(so_far);
  const Bits magnitude = bits_of(v) & splat_bits(0x7fffffff);
  return as_float(choose(reinterpret_cast<Bits>(magnitude > old), magnitude, old));
}

inline float largest_or_nan(Vec v) {
  const Bits bits = bits_of(v);
  uint32_t most = bits[0];
  for (int k = 1; k < kLanes; ++k) most = bits[k] > most ? bits[k] : most;
  float result;
  memcpy(&result, &most, sizeof(result));
  return result;
}

inline Bits fp8_of(Vec v) {
  const Bits largest = bits_of(splat(kFp8Max));
  const Bits exponent = splat_bits(kFp8Powers);
  const Bits magnitude = bits_of(v) & splat_bits(0x7fffffff);
  const Bits is_nan = reinterpret_cast<Bits>(magnitude > exponent);
  const Bits bounded = magnitude < largest ? magnitude : largest;
  const Bits power = bits_of(max(splat(kFp8SmallestNormal), as_float(bounded & exponent)));
  const Bits rounded = bits_of(as_float(power) + as_float(bounded) * splat(kFp8Unit));
  const Bits code = rounded - power + (power >> kFp8Shift) - splat_bits(kFp8Bias);
  return code | (is_nan & splat_bits(1));  // NaN is the code after the largest number
}

inline CodeBytes fp8_of(const Vec (&v)[kAtOnce], const Vec (&signs)[kAtOnce]) {
  return low_bytes(
      [&](int k) { return fp8_of(v[k]) | ((bits_of(signs[k]) >> 24) & splat_bits(0x80)); });
}

template <bool>  // kMayExceed
inline CodeBytes int8_of(const Vec (&v)[kAtOnce]) {
  return low_bytes([&](int k) {
    // Adding 1.5 * 2^23 rounds to an integer in the low bits.
    const Bits rounded = bits_of(min(splat(127), max(splat(-128), v[k])) + splat(0x1.8p23f));
    return rounded & reinterpret_cast<Bits>(v[k] == v[k]);
  });
}

inline void store_bytes(void* p, const CodeBytes& bytes, Full) { memcpy(p, &bytes, sizeof(bytes)); }

inline void store_bytes(void* p, const CodeBytes& bytes, Tail tail) {
  memcpy(p, &bytes, static_cast<size_t>(tail.count));
}

}  // namespace
