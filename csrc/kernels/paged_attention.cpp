// Paged attention, compiled once per instruction set.
//
// Online softmax: a row is one query of one head; it keeps the largest score so far, the sum of the
// exponentials and the weighted sum of values, all in float32. Keys come in tiles of positions that
// are aligned in the sequence, and every row adds them in one order. So its bits depend on its own
// query and keys only: not on other rows, on the batch, on threads, or on how a prompt is cut.
//
// Blocks are the outer loop and kv heads the inner one, which walks memory in order.
#include "kernels/paged_part.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_dot.h"
#include "kernels/vec_math.h"
#include "kernels/vec_reduce.h"

#if defined(__AMX_BF16__)
#include "kernels/paged_tiles.h"
#endif

namespace {

// Positions of a tile.
struct Span {
  int64_t begin;
  int64_t end;

  bool is_empty() const { return begin >= end; }
  bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
};

// The products of R queries and kLanes / R keys: lane r * (kLanes / R) + k.
template <int R, class K>
inline Vec products(const typename Dot<K>::Query* queries, int64_t query_stride, const K* keys,
                    int64_t size) {
  constexpr int kKeys = kLanes / R;
  constexpr int64_t kWidth = Dot<K>::kWidth;
  Vec totals[kLanes];
  for (int i = 0; i < kLanes; ++i) totals[i] = splat(0);
  const auto step = [&](int64_t d, auto part) {
    decltype(Dot<K>::key(keys, part)) key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = Dot<K>::key(keys + k * size + d, part);
    for (int r = 0; r < R; ++r) {
      const auto query = Dot<K>::query(queries + r * query_stride + d);
      for (int k = 0; k < kKeys; ++k) {
        totals[r * kKeys + k] = Dot<K>::step(query, key[k], totals[r * kKeys + k]);
      }
    }
  };
  int64_t d = 0;
  for (; d + kWidth <= size; d += kWidth) step(d, Full{});
  if (d < size) step(d, Tail{size - d});
  return sums(totals);
}

// outputs += weights * values for R rows and C vectors of the values.
template <int R, int C, class K, class Part>
inline void add_values(float* outputs, int64_t output_stride, const float (*weights)[kTile],
                       Span span, const K* values, int64_t size, Part part) {
  Vec totals[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      totals[r][c] = Lanes<float>::load(outputs + r * output_stride + c * kLanes, Full{});
    }
  }
  for (int64_t t = span.begin; t < span.end; ++t) {
    Vec value[C];
    for (int c = 0; c < C; ++c) value[c] = Lanes<K>::load(values + t * size + c * kLanes, part);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r][t]);
      for (int c = 0; c < C; ++c) totals[r][c] = fma(weight, value[c], totals[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      Lanes<float>::store(outputs + r * output_stride + c * kLanes, totals[r][c], Full{});
    }
  }
}

// As many vectors at once as there are registers for, then half as many, and so on.
template <int R, int C, class K>
inline void add_all_values(float* outputs, int64_t output_stride, const float (*weights)[kTile],
                           Span span, const K* values, int64_t size, int64_t d) {
  for (; d + C * kLanes <= size; d += C * kLanes) {
    add_values<R, C>(outputs + d, output_stride, weights, span, values + d, size, Full{});
  }
  if constexpr (C > 1) {
    add_all_values<R, C / 2>(outputs, output_stride, weights, span, values, size, d);
  } else if (d < size) {
    add_values<R, 1>(outputs + d, output_stride, weights, span, values + d, size, Tail{size - d});
  }
}

template <int R>
constexpr int value_vectors() {
  return kLanes == 16 ? (R == 4 ? 4 : 8) : 8 / R;
}

template <class T>
class Part : PagedPart<T> {
 public:
  Part(const OpweavePagedAttention& call, const OpweavePagedPart& part, float* scratch)
      : PagedPart<T>(call, part),
        query_stride_(padded(call.head_size)),
        output_stride_(padded(call.value_size)) {
    const int64_t rows = part.heads * rows_per_head_;
    queries_ = scratch;
    outputs_ = queries_ + rows * query_stride_;
    wide_keys_ = outputs_ + rows * output_stride_;
    wide_values_ = wide_keys_ + kTile * query_stride_;
    largest_ = wide_values_ + kTile * output_stride_;
    totals_ = largest_ + rows;
  }

  static int64_t scratch_size(const OpweavePagedAttention& call, int64_t tokens, int64_t heads) {
    const int64_t widths = padded(call.head_size) + padded(call.value_size);
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
      this->store_output(token, head, outputs_ + slot * output_stride_, totals_[slot]);
    });
  }

 private:
  using Query = typename Dot<T>::Query;
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
  }

  void visit_tile(int64_t head, int64_t base, int64_t count, const Tile<T, T>& tile) {
    if constexpr (sizeof(T) != sizeof(float)) {
      if (rows_per_head_ > 8) {  // from then on, widening once is cheaper than for every four rows
        widen(wide_values_, tile.values, count * call_.value_size);
        if constexpr (sizeof(Query) == sizeof(T)) {
          const Tile<T, float> wide{tile.keys, wide_values_, nullptr, nullptr};
          return visit_rows(head, base, count, wide);
        } else {
          widen(wide_keys_, tile.keys, count * call_.head_size);
          const Tile<float, float> wide{wide_keys_, wide_values_, nullptr, nullptr};
          return visit_rows(head, base, count, wide);
        }
      }
    }
    visit_rows(head, base, count, tile);
  }

  static void widen(float* to, const T* from, int64_t count) {
    for_each_vec(count, [=](int64_t i, auto part) {
      Lanes<float>::store(to + i, Lanes<T>::load(from + i, part), part);
    });
  }

  template <class K, class V>
  void visit_rows(int64_t head, int64_t base, int64_t count, Tile<K, V> tile) {
    const int64_t end = rows_per_head_;
    int64_t row = 0;
    for (; row + 4 <= end; row += 4) {
      attend<4>(head, row, base, count, tile);
      tile.next_keys = nullptr;
    }
    if (row + 2 <= end) {
      attend<2>(head, row, base, count, tile);
      tile.next_keys = nullptr;
      row += 2;
    }
    if (row < end) attend<1>(head, row, base, count, tile);
  }

  // The positions of the tile that a row sees.
  Span visible(int64_t row, int64_t base, int64_t count) const {
    const int64_t token = row / call_.group;
    const int64_t begin = most(this->first_visible(token) - base, 0);
    return {begin, most(least(this->end_visible(token) - base, count), 0)};
  }

  // R rows of one head, from `row` on. Rows that see different positions are taken apart, so that a
  // value that a query does not see cannot reach it, not even as zero times NaN.
  template <int R, class K, class V>
  void attend(int64_t head, int64_t row, int64_t base, int64_t count, const Tile<K, V>& tile) {
    const Span span = visible(row, base, count);
    if constexpr (R > 1) {
      if (!(span == visible(row + R - 1, base, count))) {
        attend<R / 2>(head, row, base, count, tile);
        attend<R / 2>(head, row + R / 2, base, count, tile);
        return;
      }
    }
    if (span.is_empty()) return;
    const int64_t first = head * rows_per_head_ + row;
    alignas(64) float weights[R][kTile];
    // In whole steps: a block has room for them, and what lies outside of the span is not used.
    const Span steps = {span.begin / kStep * kStep, padded(span.end)};
    score<R>(first, steps, tile, weights);
    for (int r = 0; r < R; ++r) soften(first + r, span, steps, weights[r]);
    add_all_values<R, value_vectors<R>()>(outputs_ + first * output_stride_, output_stride_,
                                          weights, span, tile.values, call_.value_size, 0);
  }

  template <int R, class K, class V>
  void score(int64_t first, Span steps, const Tile<K, V>& tile, float (*scores)[kTile]) {
    constexpr int64_t kKeys = kLanes / R;
    const int64_t size = call_.head_size;
    const Query* queries = query(first);
    const int64_t stride = query(1) - query(0);
    const Vec scale = splat(call_.scale);
    for (int64_t step = steps.begin; step < steps.end; step += kStep) {
      for (int64_t t = step; t < step + kStep; t += kKeys) {
        if (tile.next_keys != nullptr) {  // a little at a time: few fetches can be under way
          const int64_t bytes = static_cast<int64_t>(sizeof(K));
          prefetch(tile.next_keys + t * bytes * size, kKeys * bytes * size);
          prefetch(tile.next_values + t * bytes * call_.value_size,
                   kKeys * bytes * call_.value_size);
        }
        const Vec found = products<R>(queries, stride, tile.keys + t * size, size);
        alignas(64) float lanes[kLanes];
        Lanes<float>::store(lanes, limited(mul(found, scale)), Full{});
        for (int r = 0; r < R; ++r) memcpy(scores[r] + t, lanes + r * kKeys, sizeof(float) * kKeys);
      }
    }
  }

  Vec limited(Vec scores) const {
    if (call_.soft_cap == 0) return scores;
    const Vec cap = splat(call_.soft_cap);
    return mul(cap, tanh(div(scores, cap)));
  }

  // Turns a row's scores into weights, and rescales what it has summed up to their maximum.
  void soften(int64_t row, Span span, Span steps, float* scores) {
    for (int64_t t = steps.begin; t < span.begin; ++t) scores[t] = -__builtin_inff();
    for (int64_t t = span.end; t < steps.end; ++t) scores[t] = -__builtin_inff();
    Vec maxima = splat(largest_[row]);
    for (int64_t t = steps.begin; t < steps.end; t += kLanes) {
      maxima = max(Lanes<float>::load(scores + t, Full{}), maxima);
    }
    const float before = largest_[row];
    const float maximum = largest(maxima);
    Vec total = splat(0);
    for (int64_t t = steps.begin; t < steps.end; t += kLanes) {
      const Vec weight = exp(sub(Lanes<float>::load(scores + t, Full{}), splat(maximum)));
      Lanes<float>::store(scores + t, weight, Full{});
      total = add(total, weight);
    }
    if (maximum != before) {
      const Vec factor = exp(splat(before - maximum));
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
    totals_[row] += sum(total);
  }

  int64_t query_stride_;
  int64_t output_stride_;
  float* queries_;
  float* outputs_;
  float* wide_keys_;
  float* wide_values_;
  float* largest_;
  float* totals_;
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
