// Tokens packed for products with 4-bit weights.
//
// A token is divided into chunks of kChunk columns, as many as a vector has 4-bit weights; a lane
// of 32 bits is for eight consecutive columns. These eight numbers become integers with a common
// scale, a power of two: of 16 bits, or of 31 bits in two parts for float32, so that nothing is lost
// from 16-bit numbers unless the others of the eight are much larger. The products with weights are
// exact sums of integers. Weights of 0 to 15 stand for -8 to 7: every sum starts at -8 times the sum
// of the numbers.
#pragma once

#include "kernels/low_bit.h"
#include "kernels/row_cursor.h"
#include "kernels/vec_words.h"

namespace {

constexpr int64_t kLaneColumns = 8;
constexpr int64_t kChunk = kLaneColumns * kLanes;

// A packed chunk. numbers[p][i] holds, of part p, the columns that the i-th four bits of each pair
// of bytes belong to.
template <int P>
struct alignas(64) Chunk {
  int16_t numbers[P][4][2 * kLanes];
  int32_t start[P][kLanes];
  float scale[kLanes];
};

// The header before the chunks of a token. The sums per group follow the chunks.
struct alignas(64) TokenHeader {
  int32_t is_finite;
};

inline int64_t chunks_of(int64_t width) { return (width + kChunk - 1) / kChunk; }

template <int P>
inline const Chunk<P>* token_chunks(const char* token) {
  return reinterpret_cast<const Chunk<P>*>(token + sizeof(TokenHeader));
}

// The sum of the numbers of each group.
template <int P>
inline const float* group_sums(const char* token, int64_t width) {
  return reinterpret_cast<const float*>(token_chunks<P>(token) + chunks_of(width));
}

template <int P>
inline int64_t bytes_of_token(int64_t width, int64_t group) {
  const int64_t groups = group > 0 ? width / group : 0;
  const int64_t bytes = static_cast<int64_t>(sizeof(TokenHeader) + sizeof(Chunk<P>)) +
                        chunks_of(width) * static_cast<int64_t>(sizeof(Chunk<P>)) +
                        (groups + kLanes) * static_cast<int64_t>(sizeof(float));
  return ((bytes / 64) | 1) * 64;  // an odd number of cache lines
}

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

// Round to the nearest integer, for |v| < 2^22.
inline int32_t nearest(float v) {
  return static_cast<int32_t>(bits_of_float(v + 0x1.8p23f) - 0x4b400000u);
}

inline int32_t at_most_int16(int32_t v) { return v < 32767 ? v : 32767; }

// The scale for numbers of which the largest magnitude has these bits, a power of two: the largest
// number becomes 2^14 to 2^15. Exponents below 30 count as 30, to avoid denormals. If one is not
// finite, all become zero.
struct PowerScale {
  explicit PowerScale(uint32_t largest) {
    const uint32_t exponent = largest >> 23;
    const uint32_t used = exponent < 30 ? 30 : exponent == 255 ? 254 : exponent;
    is_finite = exponent < 255;
    scale = float_of_bits((used - 14) << 23);
    inverse = float_of_bits((268 - used) << 23);
  }

  float scaled(float number) const { return is_finite ? number * inverse : 0; }

  bool is_finite;
  float scale;
  float inverse;
};

// Pack the eight columns of a lane; returns the largest magnitude as bits, and adds to `sum`.
template <int P>
inline uint32_t pack_lane(Chunk<P>& chunk, int lane, const float* columns, float& sum) {
  uint32_t largest = 0;
  for (int i = 0; i < kLaneColumns; ++i) {
    const uint32_t magnitude = bits_of_float(columns[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const PowerScale power(largest);
  int32_t sums[P] = {};
  for (int i = 0; i < kLaneColumns; ++i) {
    const float wanted = power.scaled(columns[i]);
    int16_t* const to = chunk.numbers[0][i % 4] + 2 * lane + i / 4;
    if constexpr (P == 1) {
      const int32_t number = at_most_int16(nearest(wanted));
      *to = static_cast<int16_t>(number);
      sums[0] += number;
    } else {
      const auto high = static_cast<int32_t>(wanted);
      const int32_t low = at_most_int16(nearest((wanted - static_cast<float>(high)) * 0x1p15f));
      to[0] = static_cast<int16_t>(high);
      to[4 * 2 * kLanes] = static_cast<int16_t>(low);
      sums[0] += high;
      sums[1] += low;
    }
  }
  chunk.scale[lane] = power.scale;
  for (int p = 0; p < P; ++p) chunk.start[p][lane] = -8 * sums[p];
  sum = static_cast<float>(sums[0]);
  if constexpr (P == 2) sum += static_cast<float>(sums[1]) * 0x1p-15f;
  sum *= power.scale;
  return largest;
}

template <int P, class T>
inline void pack_token(char* out, const T* x, int64_t width, int64_t group) {
  auto* header = reinterpret_cast<TokenHeader*>(out);
  auto* chunks = const_cast<Chunk<P>*>(token_chunks<P>(out));
  float* sums = const_cast<float*>(group_sums<P>(out, width));
  for (int64_t g = 0; g < (group > 0 ? width / group : 0); ++g) sums[g] = 0;
  uint32_t largest = 0;
  int64_t left = group;  // columns of the current group
  for (int64_t column = 0; column < width; column += kChunk, ++chunks) {
    alignas(64) float columns[kChunk] = {};
    const int64_t count = width - column < kChunk ? width - column : kChunk;
    for_each_vec(count, [&](int64_t i, auto part) {
      Lanes<float>::store(columns + i, Lanes<T>::load(x + column + i, part), Full{});
    });
    float lane_sums[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t magnitude =
          pack_lane(*chunks, lane, columns + kLaneColumns * lane, lane_sums[lane]);
      largest = magnitude > largest ? magnitude : largest;
    }
    for (int64_t lane = 0; lane < count / kLaneColumns; ++lane) {
      *sums += lane_sums[lane];
      left -= kLaneColumns;
      if (left == 0) {
        ++sums;
        left = group;
      }
    }
  }
  header->is_finite = largest < 0x7f800000u;
}

constexpr int parts_of(float) { return 2; }
constexpr int parts_of(BFloat16) { return 1; }
constexpr int parts_of(Float16) { return 1; }

struct KeepTokens {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLowBitTokens& call) {
    RowCursor row(call.rows, begin);
    char* out = static_cast<char*>(call.out);
    for (int64_t r = begin; r < end; ++r, row.advance(), out += call.stride) {
      pack_token<parts_of(T{})>(
          out, reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1)), call.width,
          call.group);
    }
  }
};

}  // namespace
