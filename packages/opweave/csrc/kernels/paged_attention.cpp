// Paged attention, compiled once per instruction set.
//
// Online softmax: a row is one query of one head, with the largest score so far, the sum of the
// exponentials and the weighted sum of values, all in float32. Tiles of keys are aligned to
// positions in the sequence, and every row adds them in the same order. So the result of a row
// depends only on its own query and keys: not on other rows, the batch, threads, or prompt
// chunking.
//
// Blocks are the outer loop and kv heads the inner loop, which accesses memory sequentially.
#include "kernels/paged_lanes.h"
#include "kernels/paged_values.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_math.h"

#if defined(__AMX_BF16__)
#include "kernels/isa/paged_tiles_amx.h"
#endif

namespace {

constexpr int64_t kRows = 96;  // rows of a kv head with scores in memory at once
constexpr int64_t kFewRows = 8;  // up to this many rows, keys are not packed
constexpr int64_t kColumnsAtOnce = 64;
static_assert(kRows % kQueriesAtOnce == 0);
static_assert(kQueriesAtOnce > kFewRows);  // multiply_lanes does not support unpacked keys
static_assert(kQueriesAtOnce <= kTile);    // the buffer for a tile of keys is used to reorder them

// The maximum number of rows multiplied at once. The number of keys follows from the registers for
// sums, one operand per key and one for the row.
constexpr int kMostRows = kLanes == 8 ? 6 : 4;

template <int R>
constexpr int kKeysFor = R == 6 ? 2 : kLanes / R;

template <int R>  // vectors of their products
constexpr int kSumsFor = (R * kKeysFor<R> + kLanes - 1) / kLanes;

// Adjacent rows that attend to the same positions of a tile.
struct Band {
  int64_t first;
  int64_t rows;  // kMostRows, 4, 2 or 1
  Span span;

  // The span in whole steps: blocks have room for them, and results outside the span are ignored.
  Span steps() const { return {span.begin / kStep * kStep, padded(span.end)}; }
};

template <int N>
struct Count {
  static constexpr int kValue = N;
};

class Bands {
 public:
  explicit Bands(int64_t first) : first_(first) {}

  void add(int64_t first, int64_t rows, Span span) {
    rows_ += rows;
    while (rows > 0) {
      const int64_t taken = rows >= kMostRows ? kMostRows : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
      bands_[count_++] = {first, taken, span};
      first += taken;
      rows -= taken;
    }
  }

  int64_t rows() const { return rows_; }

  // Call visit(band, its number of rows as a Count, the number of rows before it).
  template <class Visit>
  void for_each(Visit visit) const {
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t before = bands_[i].first - first_;
      if (bands_[i].rows == kMostRows) {
        visit(bands_[i], Count<kMostRows>{}, before);
      } else if (bands_[i].rows == 4) {
        visit(bands_[i], Count<4>{}, before);
      } else if (bands_[i].rows == 2) {
        visit(bands_[i], Count<2>{}, before);
      } else {
        visit(bands_[i], Count<1>{}, before);
      }
    }
  }

 private:
  Band bands_[kRows];
  int64_t first_;
  int64_t count_ = 0;
  int64_t rows_ = 0;
};

// Compute products[r][k] for R queries and kKeysFor<R> keys.
template <int R, class K>
__attribute__((always_inline)) inline void multiply(float* products,
                                                    const typename Dot<K>::Query* queries,
                                                    int64_t query_stride, const K* keys,
                                                    int64_t size) {
  constexpr int kKeys = kKeysFor<R>;
  constexpr int64_t kWidth = Dot<K>::kWidth;
  constexpr int kSums = kSumsFor<R>;
  Vec totals[kSums][kLanes];
  OPWEAVE_UNROLL for (int i = 0; i < kSums; ++i) {
    OPWEAVE_UNROLL for (int k = 0; k < kLanes; ++k) totals[i][k] = splat(0);
  }
  const auto step = [&](int64_t d, auto part) __attribute__((always_inline)) {
    decltype(Dot<K>::key(keys, part)) key[kKeys];
    OPWEAVE_UNROLL for (int k = 0; k < kKeys; ++k) key[k] = Dot<K>::key(keys + k * size + d, part);
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      const auto query = in_register(Dot<K>::query(queries + r * query_stride + d));
      OPWEAVE_UNROLL for (int k = 0; k < kKeys; ++k) {
        Vec& total = totals[(r * kKeys + k) / kLanes][(r * kKeys + k) % kLanes];
        total = Dot<K>::step(query, key[k], total);
      }
    }
  };
  int64_t d = 0;
  for (; d + kWidth <= size; d += kWidth) step(d, Full{});
  if (d < size) step(d, Tail{size - d});
  OPWEAVE_UNROLL for (int i = 0; i < kSums; ++i) {
    Lanes<float>::store(products + i * kLanes, sums(totals[i]), Full{});
  }
}

template <class T>
class Part : PagedPart<T> {
 public:
  Part(const OpweavePagedAttention& call, const OpweavePagedPart& part, float* scratch)
      : PagedPart<T>(call, part),
        rows_in_lanes_(call.head_size % Dot<Query>::kWidth == 0
                           ? rows_per_head_ / kQueriesAtOnce * kQueriesAtOnce
                           : 0),
        query_stride_(padded(call.head_size)),
        output_stride_(padded_columns(call.value_size)) {
    const int64_t rows = part.heads * rows_per_head_;
    queries_ = scratch;
    outputs_ = queries_ + rows * query_stride_;
    wide_keys_ = outputs_ + rows * output_stride_;
    wide_values_ = wide_keys_ + kTile * query_stride_;
    largest_ = wide_values_ + kTile * output_stride_;
    totals_ = largest_ + rows;
  }

  static int64_t scratch_size(const OpweavePagedAttention& call, int64_t tokens, int64_t heads) {
    const int64_t widths = padded(call.head_size) + padded_columns(call.value_size);
    const int64_t rows = tokens * heads * call.group;
    return (rows + kTile) * widths + 2 * rows;
  }

  void run() {
    load_queries();
    this->for_each_tile([this](int64_t head, int64_t base, int64_t count, const Tile<T, T>& tile) {
      visit_tile(head, base, count, tile);
    });
    this->for_each_row([this](int64_t part_head, int64_t row, int64_t token, int64_t head) {
      const int64_t slot = part_head * rows_per_head_ + row;
      float* output = outputs_ + slot * output_stride_;
      Values::order_columns(output, output_stride_);
      this->store_output(token, head, output, totals_[slot]);
    });
  }

 private:
  using Query = typename Dot<T>::Query;
  using Values = WeightedValues<T>;
  using PagedPart<T>::call_;
  using PagedPart<T>::rows_per_head_;

  Query* query(int64_t row) const {
    return reinterpret_cast<Query*>(queries_ + row * query_stride_);
  }

  void load_queries() {
    this->for_each_row([&](int64_t part_head, int64_t row, int64_t token, int64_t head) {
      const int64_t slot = part_head * rows_per_head_ + row;
      Dot<T>::keep(query(slot), this->query_of(token, head), call_.head_size);
      float* output = outputs_ + slot * output_stride_;
      for (int64_t d = 0; d < output_stride_; d += kLanes) {
        Lanes<float>::store(output + d, splat(0), Full{});
      }
      largest_[slot] = -__builtin_inff();
      totals_[slot] = 0;
    });
    order_queries();
  }

  // Reorder queries in-place, through the buffer for keys, which is still unused.
  void order_queries() {
    for (int64_t head = 0; head < this->part_.heads; ++head) {
      for (int64_t row = 0; row < rows_in_lanes_; row += kQueriesAtOnce) {
        float* queries = queries_ + (head * rows_per_head_ + row) * query_stride_;
        order_by_lanes(wide_keys_, queries, query_stride_, vectors());
        memcpy(queries, wide_keys_, sizeof(float) * kQueriesAtOnce * vectors() * kLanes);
      }
    }
  }

  int64_t vectors() const { return call_.head_size / Dot<Query>::kWidth; }

  void visit_tile(int64_t head, int64_t base, int64_t count, const Tile<T, T>& tile) {
    if constexpr (sizeof(T) != sizeof(float)) {
      if (rows_per_head_ > kFewRows) {  // packing once is cheaper than for every band
        const auto* values = Values::keep(wide_values_, tile.values, count, call_.value_size);
        using Kept = typename Values::Kept;
        if constexpr (sizeof(Query) == sizeof(T)) {
          const Tile<T, Kept> kept{tile.keys, values, nullptr, nullptr};
          return visit_rows(head, base, count, kept);
        } else {
          widen_row(wide_keys_, tile.keys, count * call_.head_size);
          const Tile<float, Kept> wide{wide_keys_, values, nullptr, nullptr};
          return visit_rows(head, base, count, wide);
        }
      }
    }
    visit_rows(head, base, count, tile);
  }

  template <class K, class V>
  void visit_rows(int64_t head, int64_t base, int64_t count, Tile<K, V> tile) {
    for (int64_t row = 0; row < rows_per_head_; row += kRows) {
      const int64_t end = least(row + kRows, rows_per_head_);
      if constexpr (sizeof(K) == sizeof(Query)) {
        for (int64_t r = row; r < least(end, rows_in_lanes_); r += kQueriesAtOnce) {
          const Span span{visible(r, base, count).begin,
                          visible(r + kQueriesAtOnce - 1, base, count).end};
          if (span.is_empty()) continue;
          score_lanes(head * rows_per_head_ + r, span, tile, scores_ + (r - row));
          tile.next_keys = nullptr;
        }
      }
      attend(bands_of(head, row, end, base, count), head, count, tile);
      tile.next_keys = tile.next_values = nullptr;
    }
  }

  // Rows with different visible positions are in different bands, so that a masked value cannot
  // affect a query, not even as zero times NaN.
  Bands bands_of(int64_t head, int64_t row, int64_t end, int64_t base, int64_t count) const {
    Bands bands(head * rows_per_head_ + row);
    while (row < end) {
      const Span span = visible(row, base, count);
      int64_t next = row + 1;
      while (next < end && next != rows_in_lanes_ && visible(next, base, count) == span) ++next;
      if (!span.is_empty()) bands.add(head * rows_per_head_ + row, next - row, span);
      row = next;
    }
    return bands;
  }

  // Return the visible positions of the tile for a row.
  Span visible(int64_t row, int64_t base, int64_t count) const {
    const int64_t token = row / call_.group;
    const int64_t begin = most(this->first_visible(token) - base, 0);
    return {begin, most(least(this->end_visible(token) - base, count), 0)};
  }

  // Process all rows for a few keys, or columns of values, at a time: a whole tile would fill the
  // L1 cache.
  template <class K, class V>
  void attend(const Bands& bands, int64_t head, int64_t count, const Tile<K, V>& tile) {
    const int64_t end_of_lanes = head * rows_per_head_ + rows_in_lanes_;
    for (int64_t step = 0; step < count; step += kStep) {
      Tile<K, V> of_band = tile;
      bands.for_each([&](const Band& band, auto rows, int64_t before) {
        if (band.first < end_of_lanes || !band.steps().has(step)) return;
        score<rows.kValue>(band.first, step, of_band, scores_ + before);
        of_band.next_keys = nullptr;
      });
    }
    soften(bands);
    const int64_t size = call_.value_size;
    const int64_t columns = bands.rows() > kFewRows ? kColumnsAtOnce : size;
    for (int64_t d = 0; d < size; d += columns) {
      TileValues<V> values{tile.values, size, tile.next_values};
      bands.for_each([&](const Band& band, auto rows, int64_t before) {
        const RowSums sums{outputs_ + band.first * output_stride_, output_stride_,
                           scores_ + before};
        add_weighted<Values, rows.kValue>(sums, band.span, values, d, least(d + columns, size));
        values.next = nullptr;
      });
    }
  }

  // Compute the products of R rows and the keys of a step. Not inlined, so that the addresses fit
  // into registers.
  template <int R, class K, class V>
  __attribute__((noinline)) void score(int64_t first, int64_t step, const Tile<K, V>& tile,
                                       float (*scores)[kTile]) {
    constexpr int kKeys = kKeysFor<R>;
    const int64_t size = call_.head_size;
    const Query* queries = query(first);
    const int64_t stride = query(1) - query(0);
    for (int64_t t = step; t < step + kStep; t += kKeys) {
      if (tile.next_keys != nullptr) {  // gradually, because outstanding fetches are limited
        const int64_t bytes = static_cast<int64_t>(sizeof(K));
        prefetch(tile.next_keys + t * bytes * size, kKeys * bytes * size);
      }
      alignas(64) float products[kSumsFor<R> * kLanes];
      multiply<R>(products, queries, stride, tile.keys + t * size, size);
      for (int r = 0; r < R; ++r) {
        memcpy(scores[r] + t, products + r * kKeys, sizeof(float) * kKeys);
      }
    }
  }

  // Compute the products of kQueriesAtOnce rows, one per lane, and the keys of a span.
  template <class K, class V>
  void score_lanes(int64_t first, Span span, const Tile<K, V>& tile, float (*scores)[kTile]) {
    const int64_t size = call_.head_size;
    const float* queries = queries_ + first * query_stride_;
    for (int64_t t = span.begin / kLanes * kLanes; t < span.end; t += kLanes) {
      alignas(64) float products[kLanes][kQueriesAtOnce];
      for (int64_t k = 0; k < kLanes; k += kKeysAtOnce) {
        if (tile.next_keys != nullptr) {
          const int64_t bytes = static_cast<int64_t>(sizeof(K)) * size;
          prefetch(tile.next_keys + (t + k) * bytes, kKeysAtOnce * bytes);
        }
        multiply_lanes(products + k, queries, tile.keys + (t + k) * size, vectors());
      }
      for (int64_t q = 0; q < kQueriesAtOnce; q += kLanes) {
        Vec of_queries[kLanes];
        for (int k = 0; k < kLanes; ++k) {
          of_queries[k] = Lanes<float>::load(products[k] + q, Full{});
        }
        transpose(of_queries);
        for (int r = 0; r < kLanes; ++r) {
          Lanes<float>::store(scores[q + r] + t, of_queries[r], Full{});
        }
      }
    }
  }

  // Turn products into weights. The maxima of all rows are computed first, so that the latencies of
  // the rows overlap.
  void soften(const Bands& bands) {
    bands.for_each([&](const Band& band, auto rows, int64_t before) {
      for (int r = 0; r < rows.kValue; ++r) {
        maxima_[before + r] = limit(band, scores_[before + r], largest_[band.first + r]);
      }
    });
    bands.for_each([&](const Band& band, auto rows, int64_t before) {
      for (int r = 0; r < rows.kValue; ++r) {
        weigh(band.first + r, band.steps(), scores_[before + r], maxima_[before + r]);
      }
    });
  }

  // Turn products into scores, with minus infinity outside the span. Returns the maximum of them
  // and `before`.
  float limit(const Band& band, float* scores, float before) const {
    const Span steps = band.steps();
    for (int64_t t = steps.begin; t < steps.end; t += kLanes) {
      const Vec scaled = mul(Lanes<float>::load(scores + t, Full{}), splat(call_.scale));
      Lanes<float>::store(scores + t, limited(scaled), Full{});
    }
    for (int64_t t = steps.begin; t < band.span.begin; ++t) scores[t] = -__builtin_inff();
    for (int64_t t = band.span.end; t < steps.end; ++t) scores[t] = -__builtin_inff();
    Vec maxima = splat(before);
    for (int64_t t = steps.begin; t < steps.end; t += kLanes) {
      maxima = max(Lanes<float>::load(scores + t, Full{}), maxima);
    }
    return largest(maxima);
  }

  Vec limited(Vec scores) const {
    if (call_.soft_cap == 0) return scores;
    const Vec cap = splat(call_.soft_cap);
    return mul(cap, tanh(div(scores, cap)));
  }

  // Turn the scores of a row into weights, and rescale its sums to the new maximum.
  void weigh(int64_t row, Span steps, Weights& scores, float maximum) {
    Vec total = splat(0);
    // If all scores are minus infinity, subtract 0 instead of -inf, so that their weights are zero.
    const Vec origin = splat(maximum == -__builtin_inff() ? 0 : maximum);
    for (int64_t t = steps.begin; t < steps.end; t += kLanes) {
      const Vec distance = sub(Lanes<float>::load(scores + t, Full{}), origin);
      const Vec weight = exp_of_negative(distance);
      Values::store_weights(scores, t, weight);
      total = add(total, weight);
    }
    if (maximum != largest_[row]) rescale(row, maximum);
    totals_[row] += sum(total);
  }

  void rescale(int64_t row, float maximum) {
    const Vec factor = exp_of_negative(splat(largest_[row] - maximum));
    alignas(64) float lanes[kLanes];
    Lanes<float>::store(lanes, factor, Full{});
    totals_[row] *= lanes[0];
    float* output = outputs_ + row * output_stride_;
    for (int64_t d = 0; d < output_stride_; d += kLanes) {
      const Vec scaled = mul(Lanes<float>::load(output + d, Full{}), factor);
      Lanes<float>::store(output + d, scaled, Full{});
    }
    largest_[row] = maximum;
  }

  int64_t rows_in_lanes_;  // the first rows of a head, whose queries are in lane order
  int64_t query_stride_;
  int64_t output_stride_;
  float* queries_;
  float* outputs_;
  float* wide_keys_;
  float* wide_values_;
  float* largest_;
  float* totals_;
  alignas(64) Weights scores_[kRows];
  float maxima_[kRows];
};

void run(const OpweavePagedAttention* call, const OpweavePagedPart* part, float* scratch) {
#if defined(__AMX_BF16__)
  if (TiledPart::fits(*call)) return TiledPart(*call, *part, scratch).run();
#endif
  with_storage(call->dtype,
               [=](auto storage) { Part<decltype(storage)>(*call, *part, scratch).run(); });
}

int64_t scratch_size(const OpweavePagedAttention* call, int64_t tokens, int64_t heads) {
#if defined(__AMX_BF16__)
  if (TiledPart::fits(*call)) return TiledPart::scratch_size(*call, tokens, heads);
#endif
  return Part<float>::scratch_size(*call, tokens, heads);
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweavePagedAttentionKernels, paged_attention) = {
    scratch_size,
    run,
};
