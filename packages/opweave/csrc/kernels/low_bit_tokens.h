// Tokens packed for products with 4-bit weights.
//
// A token is divided into chunks of kChunk columns, as many as a vector has 4-bit weights; a lane
// of 32 bits is for eight consecutive columns. These eight numbers become integers with a common
// scale; those of 8 bits have one for four lanes. The products with weights are exact sums of
// integers. Weights of 0 to 15 stand for -8 to 7: every sum starts at -8 times the sum of the
// numbers.
#pragma once

#include "kernels/low_bit.h"
#include "kernels/packed_numbers.h"
#include "kernels/row_cursor.h"

namespace {

constexpr int kLaneColumns = 8;
constexpr int64_t kChunk = kLaneColumns * kLanes;

template <int P>
constexpr int kScaleLanes = P == kInt8 ? 4 : 1;

// A packed chunk. numbers[p][i] holds, of part p, the columns that the i-th four bits of each pair
// of bytes belong to.
template <int P>
struct alignas(64) Chunk {
  int16_t numbers[kIntegers<P>][4][2 * kLanes];
  int32_t start[kIntegers<P>][kLanes];
  float scale[kLanes];

  void set(int p, int lane, int i, int16_t number) {
    numbers[p][i % 4][2 * lane + i / 4] = number;
  }
};

#if defined(OPWEAVE_MULTIPLIES_BYTES)
// numbers[i] holds the columns that the i-th four bits of each byte belong to.
template <>
struct alignas(64) Chunk<kInt8> {
  int8_t numbers[2][4 * kLanes];
  int32_t start[1][kLanes];
  float scale[kLanes];

  void set(int, int lane, int i, int16_t number) {
    numbers[i % 2][4 * lane + i / 2] = static_cast<int8_t>(number);
  }
};
#endif

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

// Pack the columns of lanes with a common scale; returns the largest magnitude as bits. `sums` are
// those of the lanes.
template <int P>
inline uint32_t pack_lanes(Chunk<P>& chunk, int first, const float* columns, float* sums) {
  constexpr int kNumbers = kScaleLanes<P> * kLaneColumns;
  const auto packed = packed_numbers<P, kNumbers>(columns);
  for (int i = 0; i < kScaleLanes<P>; ++i) {
    const int lane = first + i;
    int32_t of_lane[2] = {};
    for (int p = 0; p < kIntegers<P>; ++p) {
      for (int j = 0; j < kLaneColumns; ++j) {
        const int16_t number = packed.numbers[p][i * kLaneColumns + j];
        chunk.set(p, lane, j, number);
        of_lane[p] += number;
      }
      chunk.start[p][lane] = -8 * of_lane[p];
    }
    chunk.scale[lane] = packed.scale;
    sums[i] = sum_of(of_lane, packed.scale);
  }
  return packed.largest;
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
    for (int lane = 0; lane < kLanes; lane += kScaleLanes<P>) {
      const uint32_t magnitude =
          pack_lanes(*chunks, lane, columns + kLaneColumns * lane, lane_sums + lane);
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

struct KeepTokens {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLowBitTokens& call) {
    RowCursor row(call.rows, begin);
    char* out = static_cast<char*>(call.out);
    for (int64_t r = begin; r < end; ++r, row.advance(), out += call.stride) {
      const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
      if (call.is_int8) {
        pack_token<kInt8>(out, x, call.width, call.group);
      } else {
        pack_token<parts_of(T{})>(out, x, call.width, call.group);
      }
    }
  }
};

}  // namespace
