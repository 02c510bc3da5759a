// Numbers of tokens as integers that have a common scale: of 16 bits, of 31 bits in two parts for
// float32, or of 8 bits.
//
// A scale is a power of two, so that nothing is lost from 16-bit numbers unless the others of the
// scale are much larger. Not with 8 bits: the largest magnitude of 32 columns becomes 127, and every
// number the nearest integer, ties to even, as in the blocks q8_0 of GGUF, but with a scale of 32
// bits. llama.cpp rounds activations so, too.
#pragma once

#include "kernels/vec_words.h"

namespace {

// In place of the number of parts.
constexpr int kInt8 = 0;

// The integers of a number: those of 8 bits are one that fits into a byte.
template <int P>
constexpr int kIntegers = P == kInt8 ? 1 : P;

constexpr int parts_of(float) { return 2; }
constexpr int parts_of(BFloat16) { return 1; }
constexpr int parts_of(Float16) { return 1; }

// The header of a packed token.
struct alignas(64) TokenHeader {
  int32_t is_finite;
};

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Round to the nearest integer, ties to even. Adding 1.5 * 2^23 instead would be fused with the
// product that gives v where there is an instruction for that, which rounds otherwise.
inline int32_t nearest(float v) { return static_cast<int32_t>(__builtin_rintf(v)); }

inline int32_t at_most_int16(int32_t v) { return v < 32767 ? v : 32767; }

// The scale of numbers. If one is not finite, all become zero.
struct Scale {
  float scaled(float number) const { return is_finite ? number * inverse : 0; }

  bool is_finite;
  float scale;
  float inverse;
};

// For numbers of which the largest magnitude has these bits, a power of two: the largest number
// becomes 2^14 to 2^15. Exponents below 30 count as 30, to avoid denormals.
struct PowerScale : Scale {
  explicit PowerScale(uint32_t largest) {
    const uint32_t exponent = largest >> 23;
    const uint32_t used = exponent < 30 ? 30 : exponent == 255 ? 254 : exponent;
    is_finite = exponent < 255;
    scale = float_of_bits((used - 14) << 23);
    inverse = float_of_bits((268 - used) << 23);
  }
};

// Magnitudes below 2^-97 count as 2^-97.
struct Int8Scale : Scale {
  explicit Int8Scale(uint32_t largest) {
    const float used = float_of_bits(largest < 30u << 23 ? 30u << 23 : largest);
    is_finite = largest < 0x7f800000u;
    scale = is_finite ? used / 127 : 0;
    inverse = is_finite ? 127 / used : 0;
  }
};

template <int P>
struct ScaleOf {
  using type = PowerScale;
};
template <>
struct ScaleOf<kInt8> {
  using type = Int8Scale;
};

// The sum of numbers from those of their parts.
inline float sum_of(const int32_t (&sums)[2], float scale) {
  return (static_cast<float>(sums[0]) + static_cast<float>(sums[1]) * 0x1p-15f) * scale;
}

// N numbers with a common scale.
template <int P, int N>
struct PackedNumbers {
  int16_t numbers[kIntegers<P>][N];
  int32_t sums[2];  // of the parts
  float scale;
  uint32_t largest;  // the bits of the largest magnitude
};

template <int P, int N>
inline PackedNumbers<P, N> packed_numbers(const float* columns) {
  PackedNumbers<P, N> to;
  to.largest = 0;
  for (int i = 0; i < N; ++i) {
    const uint32_t magnitude = bits_of_float(columns[i]) & 0x7fffffffu;
    to.largest = magnitude > to.largest ? magnitude : to.largest;
  }
  const typename ScaleOf<P>::type power(to.largest);
  to.scale = power.scale;
  to.sums[0] = to.sums[1] = 0;
  for (int i = 0; i < N; ++i) {
    const float wanted = power.scaled(columns[i]);
    if constexpr (P == 2) {
      const auto high = static_cast<int32_t>(wanted);
      const int32_t low = at_most_int16(nearest((wanted - static_cast<float>(high)) * 0x1p15f));
      to.numbers[0][i] = static_cast<int16_t>(high);
      to.numbers[1][i] = static_cast<int16_t>(low);
      to.sums[0] += high;
      to.sums[1] += low;
    } else {
      const int32_t number = at_most_int16(nearest(wanted));
      to.numbers[0][i] = static_cast<int16_t>(number);
      to.sums[0] += number;
    }
  }
  return to;
}

}  // namespace
