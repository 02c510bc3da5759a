// 4-bit weights: their scales as float32, and the weights themselves.
#pragma once

#include "kernels/low_bit.h"
#include "kernels/low_bit_tokens.h"
#include "kernels/storage.h"

namespace {

constexpr int64_t kScales = 512;  // converted at a time
constexpr int64_t kPiece = 512;   // columns widened at a time

inline const char* scales_at(const void* scales, OpweaveDtype dtype, int64_t place) {
  const int64_t size = dtype == OPWEAVE_FLOAT32 ? 4 : 2;
  return static_cast<const char*>(scales) + place * size;
}

inline void load_floats(float* to, const void* from, OpweaveDtype dtype, int64_t count) {
  with_storage(dtype, [=](auto storage) {
    using S = decltype(storage);
    for_each_vec(count, [=](int64_t i, auto part) {
      Lanes<float>::store(to + i, Lanes<S>::load(static_cast<const S*>(from) + i, part), part);
    });
  });
}

inline void load_scales(float* to, const OpweaveWeightW4& weight, int64_t row, int64_t first,
                        int64_t count) {
  load_floats(to, scales_at(weight.scale, weight.scale_dtype, row * weight.scale_stride + first),
              weight.scale_dtype, count);
}

inline void load_offsets(float* to, const OpweaveWeightW4& weight, int64_t row, int64_t first,
                         int64_t count) {
  load_floats(to, scales_at(weight.offset, weight.scale_dtype, row * weight.offset_stride + first),
              weight.scale_dtype, count);
}

// Load up to kLanes scales of R rows from the given one on; lanes past the part are zero.
template <int R, class Rows, class Part>
inline void load_scales_of_rows(Vec (&to)[R], const OpweaveWeightW4& weight, Rows rows,
                                int64_t first, Part part) {
  with_storage(weight.scale_dtype, [&](auto storage) {
    using S = decltype(storage);
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      const S* scales = static_cast<const S*>(weight.scale) + rows[r] * weight.scale_stride;
      to[r] = Lanes<S>::load(scales + first, part);
    }
  });
}

// offset + 8 * scale
inline void load_relative_offsets(float* to, const OpweaveWeightW4& weight, int64_t row,
                                  int64_t first, int64_t count) {
  float scales[kScales];
  load_scales(scales, weight, row, first, count);
  load_offsets(to, weight, row, first, count);
  for_each_vec(count, [&](int64_t i, auto part) {
    const Vec offset = Lanes<float>::load(to + i, part);
    Lanes<float>::store(to + i, fma(Lanes<float>::load(scales + i, part), splat(8), offset), part);
  });
}

// How the scales of a chunk are spread over its lanes.
struct ScaleLayout {
  explicit ScaleLayout(const OpweaveWeightW4& weight) {
    const int64_t group = weight.group;
    is_wide = group % kChunk == 0 || group == weight.width;
    is_regular = !is_wide && kChunk % group == 0;
    per_chunk = is_regular ? kChunk / group : kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      of_lane[lane] = static_cast<int32_t>(is_regular ? lane * kLaneColumns / group : lane);
    }
  }

  bool is_wide;     // a chunk has one scale
  bool is_regular;  // a chunk has several whole groups: a power of two
  int64_t per_chunk;
  int32_t of_lane[kLanes];
};

// Load kScales scales, one per lane, from the given lane on; zeros past the row, and kLanes more
// zeros.
inline void repeat_scales(float* to, const OpweaveWeightW4& weight, int64_t row, int64_t first) {
  const int64_t all = weight.width / kLaneColumns - first;
  const int64_t count = all < kScales ? all : kScales;
  int64_t column = first * kLaneColumns;
  for (int64_t i = 0; i < count; ++i, column += kLaneColumns) {
    if (i > 0 && column % weight.group != 0) {
      to[i] = to[i - 1];
    } else {
      load_scales(to + i, weight, row, column / weight.group, 1);
    }
  }
  for (int64_t i = count; i < kScales + kLanes && i < count + 2 * kLanes; ++i) to[i] = 0;
}

// Call visit(weights, column, count) for pieces of a row, as float32: rounded as the definition
// rounds.
template <class Visit>
inline void each_piece(const OpweaveWeightW4& weight, int64_t row, Visit visit) {
  alignas(64) float wide[kPiece];
  const uint8_t* q = weight.q + row * weight.q_stride;
  for (int64_t column = 0; column < weight.width;) {
    const int64_t group = column / weight.group;
    const int64_t left = (group + 1) * weight.group - column;
    const int64_t count = left < kPiece ? left : kPiece;
    float scale;
    float offset = 0;
    load_scales(&scale, weight, row, group, 1);
    if (weight.offset != nullptr) load_offsets(&offset, weight, row, group, 1);
    const float shift = weight.offset != nullptr ? 0 : -8;
    const uint8_t* bytes = q + column / 2;
    for (int64_t i = 0; i < count / 2; ++i) {
      wide[2 * i] = static_cast<float>(bytes[i] & 15);
      wide[2 * i + 1] = static_cast<float>(bytes[i] >> 4);
    }
    for (int64_t i = 0; i < count; ++i) wide[i] = (wide[i] + shift) * scale + offset;
    visit(static_cast<const float*>(wide), column, count);
    column += count;
  }
}

}  // namespace
