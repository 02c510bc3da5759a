// Intel AMX tiles: registers of sixteen rows of 64 bytes, whose product accumulates pairs of
// bfloat16 in float32:
//
//   TileShapes, TilesBorrowed  set the tile configuration of the thread, and restore it
#pragma once

#include "kernels/vec_columns.h"

namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileColumns = 32;  // of bfloat16
constexpr int64_t kTileElements = kTileRows * kTileColumns;

// A compiler barrier, because the compiler does not know that tile loads read memory.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// The rows of each tile, 16 at most, and the bytes of a row, 64 at most.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  void set(int tile, int64_t tile_rows, int64_t tile_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    bytes[tile] = static_cast<uint16_t>(tile_bytes);
  }

  void use() const {
    finish_stores();
    _tile_loadconfig(this);
  }
};

// Restores the thread's tile configuration, which may belong to another library.
class TilesBorrowed {
 public:
  TilesBorrowed() { _tile_storeconfig(before_); }
  ~TilesBorrowed() { _tile_loadconfig(before_); }
  TilesBorrowed(const TilesBorrowed&) = delete;
  TilesBorrowed& operator=(const TilesBorrowed&) = delete;

 private:
  alignas(64) uint8_t before_[sizeof(TileShapes)];
};

inline Vec splat_of(BFloat16 value) {
  return widen(_mm256_set1_epi16(static_cast<short>(value.bits)), BFloat16{});
}

// Return the largest bfloat16 magnitudes per lane, as 15 bits shifted left by one.
inline __m512i largest_magnitudes(__m512i largest, __m512i values) {
  return _mm512_max_epu16(largest, _mm512_add_epi16(values, values));
}

inline bool has_infinity_or_nan(__m512i largest) {
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(static_cast<short>(0xff00))) != 0;
}

}  // namespace
