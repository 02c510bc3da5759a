// Paged attention in bfloat16 on Intel AMX, whose registers are tiles of sixteen rows of 64 bytes.
// It multiplies pairs of bfloat16 and accumulates in float32:
//
//   scores [key, query]      = keys [key, pair] * queries [pair, query]
//   outputs [query, column] += weights [query, pair of keys] * values [pair of keys, column]
//
// where a pair is two adjacent elements in 32 bits. Keys have this layout in the cache. Queries are
// packed into it once per part, values once per tile of keys, and weights, which are computed with
// one query per lane, for each product. The sums of a query depend only on its own row.
//
// With few rows per kv head, as in decoding, most lanes would be unused. Several heads then share
// the lanes: each computes its scores in its own lanes, and the softmax is computed once for all.
#pragma once

#include "kernels/paged_part.h"
#include "kernels/vec_math.h"
#include "kernels/isa/vec_tiles_amx.h"

namespace {

constexpr int64_t kQueries = kTileRows;  // equal to the number of lanes
// Cache lines to prefetch for the next tile, per step of this tile and per tile of keys. Together
// they cover a tile with a head size of 128.
constexpr int kLinesPerStep = 8;
constexpr int kLinesPerKeys = 16;

// Prefetches the next tile, a few lines at a time: the number of outstanding fetches is limited,
// and there should always be some.
class Ahead {
 public:
  Ahead(const Tile<BFloat16, BFloat16>& tile, int64_t key_bytes, int64_t value_bytes)
      : keys_(tile.next_keys), values_(tile.next_values) {
    if (keys_ == nullptr) return;
    end_of_keys_ = keys_ + key_bytes;
    end_of_values_ = values_ + value_bytes;
  }

  void fetch(int lines) {
    for (; lines > 0 && values_ < end_of_values_; --lines, values_ += kCacheLine) {
      __builtin_prefetch(values_, 0, 2);
    }
    for (; lines > 0 && keys_ < end_of_keys_; --lines, keys_ += kCacheLine) {
      __builtin_prefetch(keys_, 0, 2);
    }
  }

 private:
  const char* keys_ = nullptr;
  const char* end_of_keys_ = nullptr;
  const char* values_ = nullptr;
  const char* end_of_values_ = nullptr;
};

// Compute scores[key][query] for `count` keys, a multiple of 16 and at most kTile.
inline void multiply_keys(float* scores, const BFloat16* keys, int64_t size, int64_t count,
                          const BFloat16* queries, Ahead& ahead) {
  const int64_t stride = size * static_cast<int64_t>(sizeof(BFloat16));
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < size; d += kTileColumns, keys += kTileColumns, queries += kTileElements) {
    ahead.fetch(kLinesPerKeys);
    _tile_loadd(6, queries, 64);
    _tile_loadd(4, keys, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (count > 16) {
      ahead.fetch(kLinesPerKeys);
      _tile_loadd(5, keys + 16 * size, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (count > 32) {
      ahead.fetch(kLinesPerKeys);
      _tile_loadd(4, keys + 32 * size, stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (count > 48) {
      ahead.fetch(kLinesPerKeys);
      _tile_loadd(5, keys + 48 * size, stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, scores, 64);
  if (count > 16) _tile_stored(1, scores + 16 * kQueries, 64);
  if (count > 32) _tile_stored(2, scores + 32 * kQueries, 64);
  if (count > 48) _tile_stored(3, scores + 48 * kQueries, 64);
}

// Add the weights of kTile keys times their values to outputs[query][column].
inline void add_products(float* outputs, const BFloat16* weights, const BFloat16* values,
                         int64_t size) {
  const int64_t output_stride = size * static_cast<int64_t>(sizeof(float));
  const int64_t value_stride = 2 * size * static_cast<int64_t>(sizeof(BFloat16));
  const BFloat16* later = values + kTileColumns * size;
  finish_stores();
  _tile_loadd(4, weights, 64);
  _tile_loadd(5, weights + kTileElements, 64);
  for (int64_t d = 0; d < size; d += 32) {
    _tile_loadd(0, outputs + d, output_stride);
    _tile_loadd(1, outputs + d + 16, output_stride);
    _tile_loadd(6, values + 2 * d, value_stride);
    _tile_loadd(7, values + 2 * d + 32, value_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, later + 2 * d, value_stride);
    _tile_loadd(7, later + 2 * d + 32, value_stride);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, outputs + d, output_stride);
    _tile_stored(1, outputs + d + 16, output_stride);
  }
}

class TiledPart : PagedPart<BFloat16> {
 public:
  TiledPart(const OpweavePagedAttention& call, const OpweavePagedPart& part, float* scratch)
      : PagedPart<BFloat16>(call, part),
        lanes_(2 * rows_per_head_ <= kQueries ? rows_per_head_ : kQueries),
        heads_(call.block_size <= kTile ? least(kQueries / lanes_, part.heads) : 1),
        blocks_(blocks_for(rows_per_head_)),
        block_floats_(floats_of_block(call)),
        values_(reinterpret_cast<BFloat16*>(scratch)),
        scratch_(scratch + heads_ * floats_of_values(call)) {
    for (int tile = 0; tile < 4; ++tile) for_scores_.set(tile, kQueries, 4 * lanes_);  // scores
    for_scores_.set(6, kQueries, 4 * lanes_);                                          // queries
    for (int tile = 0; tile < 2; ++tile) for_outputs_.set(tile, lanes_, 64);           // outputs
    for (int tile = 4; tile < 6; ++tile) for_outputs_.set(tile, lanes_, 64);           // weights
  }

  // Only whole tiles, because the memory next to a row would be multiplied too.
  static bool fits(const OpweavePagedAttention& call) {
    return call.dtype == OPWEAVE_BFLOAT16 && call.head_size % kTileColumns == 0 &&
           call.value_size % kTileColumns == 0;
  }

  static int64_t scratch_size(const OpweavePagedAttention& call, int64_t tokens, int64_t heads) {
    return heads *
           (floats_of_values(call) + blocks_for(tokens * call.group) * floats_of_block(call));
  }

  void run() {
    const TilesBorrowed borrowed;
    for_scores_.use();
    for (int64_t i = 0; i < count_of_blocks(); ++i) clear(block(i));
    load_queries();
    for_each_tile([this](int64_t head, int64_t base, int64_t count, const auto& tile) {
      visit_tile(head, base, count, tile);
    });
    for_each_row([this](int64_t part_head, int64_t row, int64_t token, int64_t head) {
      const Block of_row = block_of_row(part_head, row);
      const int64_t lane = lane_of_row(part_head, row);
      float* output = of_row.outputs + lane * call_.value_size;
      join_columns(output, call_.value_size);
      store_output(token, head, output, of_row.totals[lane]);
    });
  }

 private:
  // Up to sixteen rows of one kv head, or of several heads that share the lanes.
  struct Block {
    BFloat16* queries;  // tiles [pairs, queries]
    float* outputs;     // [queries, columns], before the division by the totals
    float* largest;     // largest score per query so far, after limited()
    float* totals;      // sum of the weights per query
    int64_t first_row;  // in the kv head
  };

  // The visible positions of a tile: from `first` to `end` for the query in each lane.
  struct Seen {
    __m512i first;
    __m512i end;
    bool is_all;

    Vec keep(Vec scores, int64_t key) const {
      if (is_all) return scores;
      const __m512i position = _mm512_set1_epi32(static_cast<int>(key));
      const __mmask16 seen =
          _mm512_cmple_epi32_mask(first, position) & _mm512_cmpgt_epi32_mask(end, position);
      return select(seen, scores, splat(-__builtin_inff()));
    }
  };

  static int64_t blocks_for(int64_t rows) { return (rows + kQueries - 1) / kQueries; }

  static int64_t floats_of_values(const OpweavePagedAttention& call) {
    return kTile * call.value_size / 2;
  }

  static int64_t floats_of_block(const OpweavePagedAttention& call) {
    return kQueries * (call.head_size / 2 + call.value_size + 2);
  }

  Block block(int64_t i) const {
    float* start = scratch_ + i * block_floats_;
    float* outputs = start + kQueries * call_.head_size / 2;
    float* largest = outputs + kQueries * call_.value_size;
    return {reinterpret_cast<BFloat16*>(start), outputs, largest, largest + kQueries,
            i % blocks_ * kQueries};
  }

  int64_t count_of_blocks() const { return (part_.heads + heads_ - 1) / heads_ * blocks_; }

  Block block_of_row(int64_t head, int64_t row) const {
    return block(head / heads_ * blocks_ + row / kQueries);
  }

  int64_t lane_of_row(int64_t head, int64_t row) const {
    return head % heads_ * lanes_ + row % kQueries;
  }

  void clear(const Block& block) const {
    memset(block.queries, 0, sizeof(float) * static_cast<size_t>(block_floats_));
    Lanes<float>::store(block.largest, splat(-__builtin_inff()), Full{});
  }

  // Load rows of 64 bytes into the place of the tiles, and transpose them there.
  void load_queries() {
    const int64_t tiles = call_.head_size / kTileColumns;
    for_each_row([&](int64_t part_head, int64_t row, int64_t token, int64_t head) {
      const BFloat16* from = query_of(token, head);
      BFloat16* to = block_of_row(part_head, row).queries;
      to += lane_of_row(part_head, row) * kTileColumns;
      for (int64_t i = 0; i < tiles; ++i) {
        memcpy(to + i * kTileElements, from + i * kTileColumns, kTileColumns * sizeof(BFloat16));
      }
    });
    for (int64_t i = 0; i < count_of_blocks(); ++i) {
      auto* rows = reinterpret_cast<__m512i*>(block(i).queries);
      for (int64_t tile = 0; tile < tiles; ++tile, rows += kQueries) {
        __m512i loaded[kQueries];
        for (int r = 0; r < kQueries; ++r) loaded[r] = _mm512_load_si512(rows + r);
        transpose(loaded);
        for (int r = 0; r < kQueries; ++r) _mm512_store_si512(rows + r, loaded[r]);
      }
    }
  }

  void visit_tile(int64_t head, int64_t base, int64_t count, const Tile<BFloat16, BFloat16>& tile) {
    constexpr int64_t kBytes = kTile * static_cast<int64_t>(sizeof(BFloat16));
    Ahead ahead(tile, kBytes * call_.head_size, kBytes * call_.value_size);
    const int64_t place = head % heads_;
    values_of_[place] = tile.values;
    odd_[place] = pair_values(place, count, tile.values, ahead);
    const bool is_last = place + 1 == heads_ || head + 1 == part_.heads;
    for (int64_t i = 0; i < blocks_; ++i) {
      const Block rows = block(head / heads_ * blocks_ + i);
      const int64_t end = least(end_visible(last_token(rows)) - base, count);
      if (end <= 0 || first_visible(first_token(rows)) >= base + count) continue;
      const int64_t keys = padded(end);
      multiply_keys(scores_ + place * lanes_, tile.keys, call_.head_size, keys,
                    rows.queries + place * lanes_ * 2, ahead);
      if (is_last) add_tile(rows, base, keys, place + 1, ahead);
    }
  }

  // Add a tile of keys to the rows of a block, which belong to `heads` heads.
  void add_tile(const Block& rows, int64_t base, int64_t keys, int64_t heads, Ahead& ahead) {
    alignas(64) BFloat16 weights[2 * kTileElements];
    soften(rows, scores_, keys, seen_by(rows, base, keys), ahead);
    pair_weights(weights, scores_, keys);
    if (lanes_ < kQueries) for_outputs_.use();
    for (int64_t place = 0; place < heads; ++place) {
      float* outputs = rows.outputs + place * lanes_ * call_.value_size;
      const BFloat16* of_head = weights + place * lanes_ * kTileColumns;
      add_products(outputs, of_head, values_of_place(place), call_.value_size);
      if (odd_[place] != 0) add_odd_values(rows, outputs, place, base, of_head);
    }
    if (lanes_ < kQueries) for_scores_.use();
  }

  BFloat16* values_of_place(int64_t place) const {
    return values_ + place * kTile * call_.value_size;
  }

  int64_t first_token(const Block& rows) const { return rows.first_row / call_.group; }

  int64_t last_token(const Block& rows) const {
    return (least(rows.first_row + kQueries, rows_per_head_) - 1) / call_.group;
  }

  Seen seen_by(const Block& rows, int64_t base, int64_t keys) const {
    if (first_visible(last_token(rows)) <= base && end_visible(first_token(rows)) >= base + keys) {
      return {_mm512_setzero_si512(), _mm512_setzero_si512(), true};
    }
    alignas(64) int32_t first[kQueries];
    alignas(64) int32_t end[kQueries];
    for (int64_t lane = 0; lane < kQueries; ++lane) {  // missing rows repeat the last one
      const int64_t row = rows.first_row + lane % lanes_;
      const int64_t token = least(row, rows_per_head_ - 1) / call_.group;
      first[lane] = static_cast<int32_t>(most(first_visible(token) - base, 0));
      end[lane] = static_cast<int32_t>(least(end_visible(token) - base, keys));
    }
    return {_mm512_load_si512(first), _mm512_load_si512(end), false};
  }

  // Pack the values of a tile in pairs of keys, padded with zeros to kTile. A key with an infinity
  // or NaN is replaced with zeros, because zero times its values would be NaN for queries that do
  // not attend to it. Returns a bit mask of these keys.
  uint64_t pair_values(int64_t place, int64_t count, const BFloat16* values, Ahead& ahead) const {
    const uint64_t there = count == kTile ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    if (pair_finite_values(place, there, values, ahead)) return 0;
    uint64_t odd = 0;
    for (int64_t key = 0; key < count; ++key) {
      const BFloat16* row = values + key * call_.value_size;
      __m512i largest = _mm512_setzero_si512();
      for (int64_t d = 0; d < call_.value_size; d += 32) {
        largest = largest_magnitudes(largest, _mm512_loadu_si512(row + d));
      }
      if (has_infinity_or_nan(largest)) odd |= uint64_t{1} << key;
    }
    pair_finite_values(place, there & ~odd, values, ahead);
    return odd;
  }

  // Pack the keys whose bits are set in `there`, and zeros for the others. Returns whether all
  // values are finite.
  bool pair_finite_values(int64_t place, uint64_t there, const BFloat16* values,
                          Ahead& ahead) const {
    const int64_t size = call_.value_size;
    __m512i largest = _mm512_setzero_si512();
    BFloat16* to = values_of_place(place);
    for (int64_t key = 0; key < kTile; key += 2, there >>= 2) {
      ahead.fetch(kLinesPerStep);
      const __mmask16 first_there = (there & 1) != 0 ? 0xffff : 0;
      const __mmask16 second_there = (there & 2) != 0 ? 0xffff : 0;
      const BFloat16* row = values + key * size;
      for (int64_t d = 0; d < size; d += 32, to += 64) {
        const __m512i first = _mm512_maskz_loadu_epi32(first_there, row + d);
        const __m512i second = _mm512_maskz_loadu_epi32(second_there, row + size + d);
        largest = largest_magnitudes(largest_magnitudes(largest, first), second);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(first, second));
        _mm512_store_si512(to + 32, _mm512_unpackhi_epi16(first, second));
      }
    }
    return !has_infinity_or_nan(largest);
  }

  // Turn scores into weights, and rescale the sums of the queries to the new maxima.
  void soften(const Block& rows, float* scores, int64_t keys, const Seen& seen,
              Ahead& ahead) const {
    constexpr int kAtOnce = 4;
    const Vec before = Lanes<float>::load(rows.largest, Full{});
    Vec maxima[kAtOnce] = {before, before, before, before};
    for (int64_t key = 0; key < keys; key += kAtOnce) {
      ahead.fetch(kLinesPerStep);
      for (int i = 0; i < kAtOnce; ++i) {
        float* at = scores + (key + i) * kQueries;
        const Vec score = limited(Lanes<float>::load(at, Full{}));
        const Vec kept = seen.keep(score, key + i);
        Lanes<float>::store(at, kept, Full{});
        maxima[i] = max(kept, maxima[i]);
      }
    }
    const Vec largest = max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]));
    // For a query without a key so far, the maximum is -inf: use 0, so that its weights are 2^-inf.
    const Vec none = splat(-__builtin_inff());
    const Vec shift = select(_mm512_cmp_ps_mask(largest, none, _CMP_EQ_OQ), splat(0), largest);
    Vec totals[kAtOnce] = {splat(0), splat(0), splat(0), splat(0)};
    for (int64_t key = 0; key < keys; key += kAtOnce) {
      ahead.fetch(kLinesPerStep);
      for (int i = 0; i < kAtOnce; ++i) {
        float* at = scores + (key + i) * kQueries;
        const Vec weight = rough_exp2(sub(Lanes<float>::load(at, Full{}), shift));
        Lanes<float>::store(at, weight, Full{});
        totals[i] = add(totals[i], weight);
      }
    }
    const Vec total = add(add(totals[0], totals[1]), add(totals[2], totals[3]));
    rescale(rows, before, largest);
    Lanes<float>::store(rows.totals, add(Lanes<float>::load(rows.totals, Full{}), total), Full{});
  }

  void rescale(const Block& rows, Vec before, Vec largest) const {
    uint32_t changed = _mm512_cmp_ps_mask(before, largest, _CMP_NEQ_UQ);
    if (changed == 0) return;
    alignas(64) float factors[kQueries];
    const Vec factor =
        select(static_cast<__mmask16>(changed), rough_exp2(sub(before, largest)), splat(1));
    Lanes<float>::store(factors, factor, Full{});
    Lanes<float>::store(rows.largest, largest, Full{});
    Lanes<float>::store(rows.totals, mul(Lanes<float>::load(rows.totals, Full{}), factor), Full{});
    for (; changed != 0; changed &= changed - 1) {
      const int64_t lane = __builtin_ctz(changed);
      float* output = rows.outputs + lane * call_.value_size;
      for (int64_t d = 0; d < call_.value_size; d += kLanes) {
        const Vec scaled = mul(Lanes<float>::load(output + d, Full{}), splat(factors[lane]));
        Lanes<float>::store(output + d, scaled, Full{});
      }
    }
  }

  // Scale and cap scores, in units of log2.
  Vec limited(Vec scores) const {
    constexpr float kLog2OfE = 1.44269504f;
    if (call_.soft_cap == 0) return mul(scores, splat(call_.scale * kLog2OfE));
    constexpr float kMost = 0x1.fffffep127f;  // an infinite scale would turn scores of 0 into NaN
    const Vec factor = min(splat(kMost), splat(call_.scale / call_.soft_cap));
    const Vec scaled = mul(scores, max(splat(-kMost), factor));
    return mul(splat(call_.soft_cap * kLog2OfE), tanh(scaled));
  }

  // Pack weights [keys, queries] into two bfloat16 tiles [queries, keys], padded with zeros to
  // kTile.
  static void pair_weights(BFloat16* tiles, const float* weights, int64_t keys) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t first = 0; first < kTile; first += kTileColumns, tiles += kTileElements) {
      __m512i pairs[kQueries];
      for (int64_t i = 0; i < kQueries; ++i) {
        const int64_t key = first + 2 * i;
        if (key >= keys) {
          pairs[i] = _mm512_setzero_si512();
          continue;
        }
        const Vec even = Lanes<float>::load(weights + key * kQueries, Full{});
        const Vec odd = Lanes<float>::load(weights + (key + 1) * kQueries, Full{});
        pairs[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
      }
      transpose(pairs);
      for (int64_t i = 0; i < kQueries; ++i) {
        _mm512_store_si512(tiles + i * kTileColumns, pairs[i]);
      }
    }
  }

  // Add the keys that pair_values() replaced with zeros to the rows of a head that attend to them.
  void add_odd_values(const Block& rows, float* outputs, int64_t place, int64_t base,
                      const BFloat16* weights) const {
    const int64_t count = least(lanes_, rows_per_head_ - rows.first_row);
    for (uint64_t odd = odd_[place]; odd != 0; odd &= odd - 1) {
      const int64_t key = __builtin_ctzll(odd);
      const BFloat16* value = values_of_[place] + key * call_.value_size;
      const BFloat16* of_key = weights + key / kTileColumns * kTileElements + key % kTileColumns;
      for (int64_t row = 0; row < count; ++row) {
        const int64_t token = (rows.first_row + row) / call_.group;
        if (base + key < first_visible(token) || base + key >= end_visible(token)) continue;
        const Vec weight = splat_of(of_key[row * kTileColumns]);
        float* output = outputs + row * call_.value_size;
        for (int64_t d = 0; d < call_.value_size; d += 32) {
          const PairedColumns columns = split(Lanes<BFloat16>::load(value + d, Full{}),
                                              Lanes<BFloat16>::load(value + d + 16, Full{}));
          add_product(output + d, weight, columns.low);
          add_product(output + d + 16, weight, columns.high);
        }
      }
    }
  }

  static void add_product(float* output, Vec weight, Vec value) {
    const Vec before = Lanes<float>::load(output, Full{});
    Lanes<float>::store(output, fma(weight, value, before), Full{});
  }

  int64_t lanes_;   // per head of a block
  int64_t heads_;   // heads that share a block
  int64_t blocks_;  // per heads_ heads
  int64_t block_floats_;
  BFloat16* values_;  // packed values of a tile, for each of the heads
  float* scratch_;
  TileShapes for_scores_;
  TileShapes for_outputs_;
  const BFloat16* values_of_[kQueries];  // unpacked values of the tile, for each of the heads
  uint64_t odd_[kQueries];               // keys that pair_values() replaced with zeros
  alignas(64) float scores_[kTile * kQueries] = {};
};

}  // namespace
