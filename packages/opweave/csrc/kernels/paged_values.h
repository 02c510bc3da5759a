// Paged attention: add the weights of rows times the values of a tile.
//
// This uses float32, or products of bfloat16 pairs if the CPU supports them. The values of two
// keys, the first at an even position, then form pairs, and so do the two weights of a row, rounded
// to bfloat16 (as in torch's own attention). A masked key counts as zero in its pair. The columns
// of the sums have the order that results from unpacking two rows.
#pragma once

#include "kernels/paged_part.h"
#include "kernels/unroll.h"
#include "kernels/vec_columns.h"
#include "kernels/vec_dot.h"

namespace {

// A range of positions in a tile.
struct Span {
  int64_t begin;
  int64_t end;

  bool is_empty() const { return begin >= end; }
  bool has(int64_t position) const { return begin <= position && position < end; }
  bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
};

// A row of weights: 64 float32, or 64 bfloat16 in the first half.
using Weights = float[kTile];

// The sums of some rows, and the weights of the values to add.
struct RowSums {
  // Load C vectors of columns from d on, for R rows.
  template <int R, int C>
  void load(Vec (&totals)[R][C], int64_t d) const {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int c = 0; c < C; ++c) {
        totals[r][c] = Lanes<float>::load(outputs + r * stride + d + c * kLanes, Full{});
      }
    }
  }
  template <int R, int C>
  void store(const Vec (&totals)[R][C], int64_t d) const {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int c = 0; c < C; ++c) {
        Lanes<float>::store(outputs + r * stride + d + c * kLanes, totals[r][c], Full{});
      }
    }
  }

  float* outputs;
  int64_t stride;
  const Weights* weights;
};

// The values of a tile.
template <class V>
struct TileValues {
  // Prefetch a part of the next tile: the columns of key t from column d on. Prefetching everything
  // at once would exceed the number of outstanding fetches.
  void fetch_next(int64_t t, int64_t d, int64_t columns) const {
    if (next == nullptr) return;
    const int64_t bytes = static_cast<int64_t>(sizeof(V));
    prefetch(next + (t * size + d) * bytes, columns * bytes);
  }

  const V* values;
  int64_t size;
  const char* next;  // or null
};

// Add weights * values to the sums of R rows, in C vectors of columns from d on.
template <int R, int C, class V, class Part>
inline void add_values(RowSums sums, Span span, TileValues<V> tile, int64_t d, Part part) {
  Vec totals[R][C];
  sums.load(totals, d);
  for (int64_t t = span.begin; t < span.end; ++t) {
    tile.fetch_next(t, d, C * kLanes);
    Vec value[C];
    OPWEAVE_UNROLL for (int c = 0; c < C; ++c) {
      value[c] = Lanes<V>::load(tile.values + t * tile.size + d + c * kLanes, part);
    }
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      const Vec weight = splat(sums.weights[r][t]);
      OPWEAVE_UNROLL for (int c = 0; c < C; ++c) totals[r][c] = fma(weight, value[c], totals[r][c]);
    }
  }
  sums.store(totals, d);
}

// The operations for values of T:
//   Kept, keep       the packed values of a tile, for many rows
//   store_weights    stores the weights of kLanes keys from t on, possibly over their scores
//   add              adds weights * values to the sums of R rows, in C vectors of columns from d on
//   kFewest          the minimum C
//   order_columns    restores the order of the columns of an output
template <class T>
struct WeightedValues {
  using Kept = float;
  static constexpr int kFewest = 1;

  static const Kept* keep(float* to, const T* values, int64_t keys, int64_t size) {
    widen_row(to, values, keys * size);
    return to;
  }
  static void store_weights(Weights& row, int64_t t, Vec weights) {
    Lanes<float>::store(row + t, weights, Full{});
  }
  template <int R, int C, class V, class Part>
  static void add(RowSums sums, Span span, TileValues<V> tile, int64_t d, Part part) {
    add_values<R, C>(sums, span, tile, d, part);
  }
  static void order_columns(float*, int64_t) {}
};

#if defined(__AVX512BF16__)

struct ValuePair {
  BFloat16 first;
  BFloat16 second;
};

// Load the values of keys t and t + 1 in G times 32 columns from d on.
template <int G, class Part>
inline void load_pairs(__m512i (&pairs)[2 * G], const BFloat16* values, int64_t size, int64_t t,
                       int64_t d, Part part) {
  OPWEAVE_UNROLL for (int g = 0; g < G; ++g) {
    const BFloat16* first = values + t * size + d + g * kPairedColumns;
    const auto low = (__m512i)Dot<BFloat16>::key(first, part);
    const auto high = (__m512i)Dot<BFloat16>::key(first + size, part);
    pairs[2 * g] = _mm512_unpacklo_epi16(low, high);
    pairs[2 * g + 1] = _mm512_unpackhi_epi16(low, high);
  }
}

// Load them from packed values.
template <int G, class Part>
inline void load_pairs(__m512i (&pairs)[2 * G], const ValuePair* values, int64_t size, int64_t t,
                       int64_t d, Part) {
  const ValuePair* row = values + t / 2 * padded_columns(size) + d;
  OPWEAVE_UNROLL for (int k = 0; k < 2 * G; ++k) pairs[k] = load_words(row + k * kLanes);
}

inline void pair_values(ValuePair* to, const BFloat16* values, int64_t keys, int64_t size) {
  const auto write = [&](int64_t t, int64_t d, auto part) {
    __m512i pairs[2];
    load_pairs<1>(pairs, values, size, t, d, part);
    for (const __m512i& pair : pairs) {
      store_words(to, pair);
      to += kLanes;
    }
  };
  for (int64_t t = 0; t < keys; t += 2) {  // the block size is even, so the last key can be read
    int64_t d = 0;
    for (; d + kPairedColumns <= size; d += kPairedColumns) write(t, d, Full{});
    if (d < size) write(t, d, Tail{size - d});
  }
}

// Not inlined, so that the operands of a step fit into registers.
template <int R, int G, class V, class Part>
__attribute__((noinline)) void add_pairs(RowSums sums, Span span, TileValues<V> tile, int64_t d,
                                         Part part) {
  Vec totals[R][2 * G];
  sums.load(totals, d);
  const auto add = [&](int64_t t, auto seen) __attribute__((always_inline)) {
    __m512i pairs[2 * G];
    tile.fetch_next(t, d, G * kPairedColumns);
    tile.fetch_next(t + 1, d, G * kPairedColumns);
    load_pairs<G>(pairs, tile.values, tile.size, t, d, part);
    OPWEAVE_UNROLL for (__m512i& pair : pairs) pair = seen(pair);
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      int both;
      memcpy(&both, reinterpret_cast<const BFloat16*>(sums.weights[r]) + t, sizeof both);
      const auto weight = (__m512bh)_mm512_set1_epi32(both);
      OPWEAVE_UNROLL for (int k = 0; k < 2 * G; ++k) {
        totals[r][k] = _mm512_dpbf16_ps(totals[r][k], weight, (__m512bh)pairs[k]);
      }
    }
  };
  int64_t t = span.begin;
  if (t % 2 != 0) {
    add(t - 1, [](__m512i pair) { return _mm512_and_si512(pair, _mm512_set1_epi32(~0xffff)); });
    ++t;
  }
  for (; t + 2 <= span.end; t += 2) add(t, [](__m512i pair) { return pair; });
  if (t < span.end) {
    add(t, [](__m512i pair) { return _mm512_and_si512(pair, _mm512_set1_epi32(0xffff)); });
  }
  sums.store(totals, d);
}

template <>
struct WeightedValues<BFloat16> {
  using Kept = ValuePair;
  static constexpr int kFewest = 2;

  static const Kept* keep(float* to, const BFloat16* values, int64_t keys, int64_t size) {
    auto* pairs = reinterpret_cast<ValuePair*>(to);
    pair_values(pairs, values, keys, size);
    return pairs;
  }
  static void store_weights(Weights& row, int64_t t, Vec weights) {
    Lanes<BFloat16>::store(reinterpret_cast<BFloat16*>(row) + t, weights, Full{});
  }
  template <int R, int C, class V, class Part>
  static void add(RowSums sums, Span span, TileValues<V> tile, int64_t d, Part part) {
    add_pairs<R, C / kFewest>(sums, span, tile, d, part);
  }
  static void order_columns(float* output, int64_t size) { join_columns(output, size); }
};

#endif

template <int R>
constexpr int kValuesFor = kLanes == 16 ? (R == 4 ? 4 : 8) : R == 6 ? 2 : 8 / R;

// Add columns d to `end`: as many vectors at once as fit into registers, then half as many, and so
// on. Only the very last columns may be a partial vector.
template <class Values, int R, int C = kValuesFor<R>, class V>
inline void add_weighted(RowSums sums, Span span, TileValues<V> tile, int64_t d, int64_t end) {
  constexpr int64_t kColumns = C * kLanes;
  for (; d + kColumns <= end; d += kColumns) {
    Values::template add<R, C>(sums, span, tile, d, Full{});
  }
  if constexpr (C > Values::kFewest) {
    add_weighted<Values, R, C / 2>(sums, span, tile, d, end);
  } else if (d < end) {
    Values::template add<R, C>(sums, span, tile, d, Tail{end - d});
  }
}

}  // namespace
