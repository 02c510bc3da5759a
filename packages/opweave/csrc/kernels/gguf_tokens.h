// Tokens packed for products with the blocks of GGUF files: in the order of the columns, with a scale
// for 32 of them.
#pragma once

#include "kernels/gguf_blocks.h"
#include "kernels/packed_numbers.h"

namespace {

template <int P>
struct alignas(64) UnitX {
  int16_t numbers[kIntegers<P>][kUnit32];
};

// A packed token: whether it is finite, its units, their scales and their sums. The sums of eight
// units follow eight zeros, like the offsets of blocks follow the scales.
template <int P>
struct TokenUnits {
  TokenUnits(const char* token, int64_t width)
      : units(reinterpret_cast<const UnitX<P>*>(token + sizeof(TokenHeader))),
        sums(reinterpret_cast<const float*>(units + width / kUnit32)),
        scales(sums + sums_of(width)) {}

  static int64_t sums_of(int64_t width) { return (width / kUnit32 + 7) / 8 * 16; }
  static int64_t place_of_sum(int64_t unit) { return unit / 8 * 16 + 8 + unit % 8; }

  static int64_t bytes(int64_t width) {
    const int64_t count = width / kUnit32;
    const int64_t all =
        static_cast<int64_t>(sizeof(TokenHeader)) + count * static_cast<int64_t>(sizeof(UnitX<P>)) +
        (sums_of(width) + count) * static_cast<int64_t>(sizeof(float));
    return (((all + 63) / 64) | 1) * 64;
  }

  const UnitX<P>* units;
  const float* sums;
  const float* scales;
};

// Pack 32 columns; returns the largest magnitude as bits.
template <int P>
inline uint32_t pack_unit(UnitX<P>& to, float& scale, float& sum, const float* columns) {
  const auto packed = packed_numbers<P, kUnit32>(columns);
  memcpy(to.numbers, packed.numbers, sizeof(to.numbers));
  scale = packed.scale;
  sum = sum_of(packed.sums, packed.scale);
  return packed.largest;
}

// Pack a token in the order of its columns.
template <int P, class T>
inline void pack_units(char* out, const T* x, int64_t width) {
  const TokenUnits<P> token(out, width);
  memset(const_cast<float*>(token.sums), 0,
         static_cast<size_t>(token.sums_of(width)) * sizeof(float));
  uint32_t largest = 0;
  for (int64_t u = 0; u < width / kUnit32; ++u) {
    alignas(64) float columns[kUnit32];
    for_each_vec(kUnit32, [&](int64_t i, auto part) {
      Lanes<float>::store(columns + i, Lanes<T>::load(x + u * kUnit32 + i, part), part);
    });
    const uint32_t magnitude = pack_unit<P>(
        const_cast<UnitX<P>&>(token.units[u]), const_cast<float&>(token.scales[u]),
        const_cast<float&>(token.sums[token.place_of_sum(u)]), columns);
    largest = magnitude > largest ? magnitude : largest;
  }
  reinterpret_cast<TokenHeader*>(out)->is_finite = largest < 0x7f800000u;
}

}  // namespace
