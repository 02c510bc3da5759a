// Tokens as integers of 8 bits, with a scale for every 32 columns.
//
// The largest magnitude of 32 columns becomes 127, and every number the nearest integer, ties to
// even: as in the blocks q8_0 of GGUF, but with a scale of 32 bits. llama.cpp rounds activations so,
// too.
#pragma once

#include "kernels/low_bit_tokens.h"

namespace {

// The scale for numbers of which the largest magnitude has these bits. Magnitudes below 2^-97 count
// as 2^-97, to avoid denormals. If one is not finite, all become zero.
struct Int8Scale {
  explicit Int8Scale(uint32_t largest) {
    const float used = float_of_bits(largest < 30u << 23 ? 30u << 23 : largest);
    is_finite = largest < 0x7f800000u;
    scale = is_finite ? used / 127 : 0;
    inverse = is_finite ? 127 / used : 0;
  }

  float scaled(float number) const { return is_finite ? number * inverse : 0; }

  bool is_finite;
  float scale;
  float inverse;
};

}  // namespace
