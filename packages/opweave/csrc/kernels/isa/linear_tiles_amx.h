// Linear layers for many tokens with narrow weights on Intel AMX; see isa/vec_tiles_amx.h.
//
//   sums [row, token] += weights [row, pair] * tokens [pair, token]
//
// where a pair is two adjacent columns in 32 bits. Weights have this layout after they are widened
// to bfloat16, which is exact for 8 bits. Tokens are packed into it once, with each number split
// into one to three bfloat16 summands. A block of weights is widened into the L1 cache and multiplied with all
// tokens, whose columns of the block stay in the L2 cache for several blocks. Every output sums its
// products in the order of the columns, so it depends only on its own token and weights. Incomplete
// tiles are padded with zeros.
#pragma once

#include "kernels/linear.h"
#include "kernels/linear_outputs.h"
#include "kernels/prefetch.h"
#include "kernels/row_cursor.h"
#include "kernels/storage.h"
#include "kernels/vec_dot.h"
#include "kernels/isa/vec_tiles_amx.h"

namespace {

constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kBlockColumns = 512;
constexpr int64_t kBlockTiles = kBlockColumns / kTileColumns;
// Row stride of a block, in elements. It is not a power of two, so that rows map to different cache
// sets.
constexpr int64_t kWideStride = kBlockColumns + kTileColumns;
constexpr int64_t kGroupRows = 4 * kBlockRows;  // limited by the sums on the stack

inline int64_t tiles_of(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

// The number of bfloat16 summands that represent a number of type T.
template <class T>
constexpr int kParts = 1;
template <>
constexpr int kParts<Float16> = 2;
template <>
constexpr int kParts<float> = 3;

// Load up to 32 columns of a token, padded with zeros.
inline void load_parts(__m512i (&parts)[1], const BFloat16* from, int64_t columns) {
  const Tail tail{columns};
  touch(from, tail);
  const auto mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1u);
  parts[0] = _mm512_maskz_loadu_epi16(mask, from);
}

// Truncate to bfloat16. `rest` becomes the remainder, or zero for infinity and NaN.
inline __m512i cut(Vec& rest) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i quiet = _mm512_set1_epi32(0x7fc00000);
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(rest), upper);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q);
  const __m512i part = _mm512_mask_mov_epi32(bits, is_nan, quiet);
  rest = sub(rest, _mm512_castsi512_ps(part));
  rest = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest, rest, _CMP_ORD_Q), rest);
  return part;
}

template <class T>
inline void load_parts(__m512i (&parts)[kParts<T>], const T* from, int64_t columns) {
  const __m512i upper_halves =
      _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                       25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  Vec first = splat(0);
  Vec second = splat(0);
  if (columns == kTileColumns) {
    first = Lanes<T>::load(from, Full{});
    second = Lanes<T>::load(from + kLanes, Full{});
  } else if (columns > kLanes) {
    first = Lanes<T>::load(from, Full{});
    second = Lanes<T>::load(from + kLanes, Tail{columns - kLanes});
  } else {
    first = Lanes<T>::load(from, Tail{columns});
  }
  for (__m512i& part : parts) {
    const __m512i low = cut(first);
    part = _mm512_permutex2var_epi16(low, upper_halves, cut(second));
  }
}

struct KeepTiles {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLinearTokens& call) {
    RowCursor row(call.rows, begin);
    char* out = static_cast<char*>(call.out);
    for (int64_t first = begin; first < end; first += kTileRows) {
      const T* rows[kTileRows] = {};
      for (int64_t r = 0; r < kTileRows && first + r < end; ++r, row.advance()) {
        rows[r] = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
      }
      keep_block(out, rows, call);
      out += kBlockTiles * kParts<T> * kTileElements * static_cast<int64_t>(sizeof(BFloat16));
    }
  }

 private:
  template <class T>
  static void keep_block(char* out, const T* const (&rows)[kTileRows],
                         const OpweaveLinearTokens& call) {
    for (int64_t tile = 0; tile < tiles_of(call.width); ++tile) {
      const int64_t column = tile * kTileColumns;
      const int64_t left = call.width - column;
      const int64_t columns = left < kTileColumns ? left : kTileColumns;
      __m512i pairs[kParts<T>][kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) {
        __m512i parts[kParts<T>] = {};
        if (rows[r] != nullptr) load_parts(parts, rows[r] + column, columns);
        for (int i = 0; i < kParts<T>; ++i) pairs[i][r] = parts[i];
      }
      auto* to = reinterpret_cast<__m512i*>(out + tile / kBlockTiles * call.stride) +
                 tile % kBlockTiles * kParts<T> * kTileRows;
      for (auto& of_part : pairs) {
        transpose(of_part);
        for (const __m512i& pair : of_part) _mm512_store_si512(to++, pair);
      }
    }
  }
};

// Add the products of a block of weights with T tiles of tokens to sums. In `tokens`, the summands
// of a tile are adjacent.
template <int T>
inline void add_products(float* sums, const BFloat16* weights, const BFloat16* tokens,
                         int64_t next_tokens, int64_t tiles, int parts, int64_t next_sums,
                         bool is_first) {
  constexpr int64_t kStride = kWideStride * static_cast<int64_t>(sizeof(BFloat16));
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + next_sums, 64);
    if constexpr (T == 2) {
      _tile_loadd(2, sums + kTileRows * kTileRows, 64);
      _tile_loadd(3, sums + next_sums + kTileRows * kTileRows, 64);
    }
  }
  for (int64_t i = 0; i < tiles; ++i, weights += kTileColumns) {
    _tile_loadd(4, weights, kStride);
    _tile_loadd(5, weights + kTileRows * kWideStride, kStride);
    for (int part = 0; part < parts; ++part, tokens += kTileElements) {
      _tile_loadd(6, tokens, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (T == 2) {
        _tile_loadd(7, tokens + next_tokens, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + next_sums, 64);
  if constexpr (T == 2) {
    _tile_stored(2, sums + kTileRows * kTileRows, 64);
    _tile_stored(3, sums + next_sums + kTileRows * kTileRows, 64);
  }
}

// Weights of 8 bits, which LinearTiles reads:
//   kUnit         the unit of the widened weights
//   fetch, widen  `width` weights of a row from a column on, a multiple of kBlockColumns: prefetch
//                 them, or write them as bfloat16, padded with zeros to a whole tile
template <class W>
class Weights8 {
  using D = Dot<W, BFloat16>;

 public:
  static constexpr float kUnit = D::kUnit;

  explicit Weights8(const OpweaveLinear& call) : call_(call) {}

  void fetch(int64_t row, int64_t column, int64_t width) const {
    prefetch(at(row, column), width);  // one byte per weight
  }
  void widen(BFloat16* to, int64_t row, int64_t column, int64_t width) const {
    D::widen(to, at(row, column), width);
  }

 private:
  const W* at(int64_t row, int64_t column) const {
    return static_cast<const W*>(call_.weight) + row * call_.weight_stride + column;
  }

  const OpweaveLinear& call_;
};

template <class Weights>
class LinearTiles {
 public:
  LinearTiles(const OpweaveLinear& call, Weights weights)
      : call_(call),
        weights_(weights),
        token_tiles_((call.tokens + kTileRows - 1) / kTileRows) {}

  template <class T>
  void run(int64_t begin, int64_t end) const {
    const TilesBorrowed borrowed;
    TileShapes{}.use();
    for (int64_t n = begin; n < end; n += kGroupRows) {
      const int64_t rows = end - n < kGroupRows ? end - n : kGroupRows;
      alignas(64) float sums[kGroupRows * OPWEAVE_LINEAR_MANY_TOKENS];
      for (int64_t k = 0; k < call_.width; k += kBlockColumns) {
        for (int64_t r = 0; r < rows; r += kBlockRows) {
          add_block<T>(sums + r * token_tiles_ * kTileRows, n, r, rows, k);
        }
      }
      for (int64_t r = 0; r < rows; r += kTileRows) {
        store<T>(sums + r * token_tiles_ * kTileRows, n + r,
                 rows - r < kTileRows ? rows - r : kTileRows);
      }
    }
  }

 private:
  // Add the block that begins with row r of a group of `rows` rows, whose first row is n.
  template <class T>
  void add_block(float* sums, int64_t n, int64_t r, int64_t rows, int64_t column) const {
    alignas(64) BFloat16 wide[kBlockRows * kWideStride];
    const int64_t left = call_.width - column;
    const int64_t width = left < kBlockColumns ? left : kBlockColumns;
    const bool is_last = r + kBlockRows >= rows;
    const int64_t next_row = is_last ? n : n + r + kBlockRows;
    const int64_t next_column = is_last ? column + kBlockColumns : column;
    for (int64_t i = 0; i < kBlockRows; ++i) {
      BFloat16* to = wide + i * kWideStride;
      if (r + i < rows) {
        weights_.fetch(next_row + i, next_column, width);
        weights_.widen(to, n + r + i, column, width);
      } else {
        memset(to, 0, kBlockColumns * sizeof(BFloat16));
      }
    }
    finish_stores();
    multiply(sums, wide, tiles_of(width), kParts<T>, column);
  }

  void multiply(float* sums, const BFloat16* wide, int64_t tiles, int parts, int64_t column) const {
    const auto* tokens = reinterpret_cast<const BFloat16*>(static_cast<const char*>(call_.x) +
                                                           column / kBlockColumns * call_.x_stride);
    const int64_t next_tokens = kBlockTiles * parts * kTileElements;
    const int64_t next_sums = token_tiles_ * kTileRows * kTileRows;
    int64_t t = 0;
    for (; t + 2 <= token_tiles_; t += 2, tokens += 2 * next_tokens) {
      add_products<2>(sums + t * kTileRows * kTileRows, wide, tokens, next_tokens, tiles, parts,
                      next_sums, column == 0);
    }
    if (t < token_tiles_) {
      add_products<1>(sums + t * kTileRows * kTileRows, wide, tokens, next_tokens, tiles, parts,
                      next_sums, column == 0);
    }
  }

  template <class T>
  void store(const float* sums, int64_t n, int64_t rows) const {
    const LinearOutputs<T> outputs(n, rows, Weights::kUnit, call_);
    for (int64_t token = 0; token < call_.tokens; token += kTileRows) {
      __m512i of_tokens[kTileRows];
      for (__m512i& of_row : of_tokens) {
        of_row = _mm512_load_si512(sums);
        sums += kTileRows;
      }
      transpose(of_tokens);
      for (int64_t t = 0; t < kTileRows && token + t < call_.tokens; ++t) {
        outputs.store(token + t, _mm512_castsi512_ps(of_tokens[t]));
      }
    }
  }

  const OpweaveLinear& call_;
  Weights weights_;
  int64_t token_tiles_;
};

inline int64_t bytes_of_tiles(OpweaveDtype dtype) {
  int64_t parts = 1;
  with_storage(dtype, [&](auto storage) { parts = kParts<decltype(storage)>; });
  return parts * kBlockTiles * kTileElements * static_cast<int64_t>(sizeof(BFloat16));
}

// The table entry of a kernel that multiplies by tiles.
constexpr OpweaveLinearMany many_by_tiles(OpweaveRangeKernel linear) {
  return {run_for_type<KeepTiles, OpweaveLinearTokens>, linear, kTileRows, kBlockColumns,
          bytes_of_tiles};
}

}  // namespace
