// out = x @ weight.T + bias, for two layouts of the weight.

#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"

namespace acme::kernels {

// x: (rows, in), weight: (out_features, in), bias: (out_features) or null, out: (rows, out_features);
// all contiguous. A row of the weight is read once for all rows of x.
template <class T>
void linear(T* out, const T* x, const T* weight, const T* bias, std::int64_t rows, std::int64_t in,
            std::int64_t out_features) {
  std::vector<float> wide_x(rows * in), wide_weight(in);
  widen(wide_x.data(), x, rows * in);
  for (std::int64_t o = 0; o < out_features; ++o) {
    widen(wide_weight.data(), weight + o * in, in);
    const float start = bias == nullptr ? 0.0f : float(bias[o]);
    for (std::int64_t r = 0; r < rows; ++r) {
      out[r * out_features + o] = T(start + dot(&wide_x[r * in], wide_weight.data(), in));
    }
  }
}

constexpr int kTile = 16;            // outputs that are computed side by side
constexpr std::int64_t kPart = 64;  // inputs whose products are added up at once

// The same with the weight in tiles, (ceil(out_features / kTile), in, kTile): what kTile outputs
// need of one input lies side by side. Padding in the last tile is not used.
template <class T>
void tiled_linear(T* out, const T* x, const T* tiles, const T* bias, std::int64_t rows,
                  std::int64_t in, std::int64_t out_features) {
  for (std::int64_t first = 0; first < out_features; first += kTile) {
    const T* const tile = tiles + first * in;
    const std::int64_t count = std::min<std::int64_t>(kTile, out_features - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      float sums[kTile] = {};
      for (std::int64_t i = 0; i < in;) {
        float part[kTile] = {};  // short sums first, which lose less
        for (const std::int64_t end = std::min(i + kPart, in); i < end; ++i) {
          const float value = float(x[r * in + i]);
          for (int o = 0; o < kTile; ++o) part[o] += value * float(tile[i * kTile + o]);
        }
        for (int o = 0; o < kTile; ++o) sums[o] += part[o];
      }
      for (std::int64_t o = 0; o < count; ++o) {
        const float start = bias == nullptr ? 0.0f : float(bias[first + o]);
        out[r * out_features + first + o] = T(start + sums[o]);
      }
    }
  }
}

}  // namespace acme::kernels
