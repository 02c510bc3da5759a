// Paged attention, compiled once per instruction set.
//
// Online softmax: a row is one query of one head; it keeps the largest score so far, the sum of the
// exponentials and the weighted sum of values, all in float32. Keys come in tiles of positions that
// are aligned in the sequence, and every row adds them in one order. So its bits depend on its own
// query and keys only: not on other rows, on the batch, on threads, or on how a prompt is cut.
//
// Blocks are the outer loop and kv heads the inner one, which walks memory in order.
#include "kernels/paged_attention.h"

#include "kernels/quant_row.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_dot.h"
#include "kernels/vec_math.h"
#include "kernels/vec_reduce.h"

namespace {

constexpr int64_t kTile = 64;  // keys per step of the online softmax
constexpr int64_t kStep = OPWEAVE_PAGED_STEP;
constexpr int64_t kCacheLine = 64;

inline int64_t padded(int64_t size) { return (size + kStep - 1) / kStep * kStep; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Positions of a tile.
struct Span {
  int64_t begin;
  int64_t end;

  bool is_empty() const { return begin >= end; }
  bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
};

// Keys and values of one kv head at the positions of a tile.
template <class K, class V>
struct Tile {
  const K* keys;
  const V* values;
  const char* next_keys;  // what to fetch into the cache meanwhile, or null
  const char* next_values;
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

inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(from + i, 0, 2);
}

template <class T>
class Part {
 public:
  Part(const OpweavePagedAttention& call, const OpweavePagedPart& part, float* scratch)
      : call_(call),
        part_(part),
        query_stride_(padded(call.head_size)),
        output_stride_(padded(call.value_size)),
        rows_per_head_(part.tokens * call.group),
        first_query_(call.cu_seqlens_q[part.sequence] + part.first_token),
        length_(call.seq_lens[part.sequence]) {
    const int64_t queries = call.cu_seqlens_q[part.sequence + 1] - call.cu_seqlens_q[part.sequence];
    first_position_ = length_ - queries + part.first_token;
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
    const int64_t begin = first_visible(0);
    const int64_t end = most(end_visible(part_.tokens - 1), 0);
    const int64_t last_block = (end + call_.block_size - 1) / call_.block_size;
    for (int64_t block = begin / call_.block_size; block < last_block; ++block) {
      for (int64_t head = 0; head < part_.heads; ++head) {
        const int64_t next = head + 1 < part_.heads ? block : block + 1;
        visit(block, head, next < last_block ? next : -1, (head + 1) % part_.heads);
      }
    }
    store_outputs();
  }

 private:
  using Query = typename Dot<T>::Query;

  Query* query(int64_t row) const {
    return reinterpret_cast<Query*>(queries_ + row * query_stride_);
  }

  // The positions that a token sees are first_visible() to end_visible(), which may be negative.
  int64_t first_visible(int64_t token) const {
    return call_.window == 0 ? 0 : most(first_position_ + token - call_.window + 1, 0);
  }

  int64_t end_visible(int64_t token) const {
    return call_.is_causal ? first_position_ + token + 1 : length_;
  }

  // Calls visit(row, token, query head) for every row, in order.
  template <class Visit>
  void for_each_row(Visit visit) const {
    int64_t row = 0;
    for (int64_t head = 0; head < part_.heads; ++head) {
      for (int64_t token = 0; token < part_.tokens; ++token) {
        for (int64_t g = 0; g < call_.group; ++g, ++row) {
          visit(row, first_query_ + token, (part_.first_head + head) * call_.group + g);
        }
      }
    }
  }

  void load_queries() {
    const T* base = static_cast<const T*>(call_.query);
    for_each_row([&](int64_t row, int64_t token, int64_t head) {
      const T* x = base + token * call_.query_token_stride + head * call_.query_head_stride;
      Dot<T>::keep(query(row), x, call_.head_size);
      float* output = outputs_ + row * output_stride_;
      for (int64_t d = 0; d < output_stride_; d += kLanes) {
        Lanes<float>::store(output + d, splat(0), Full{});
      }
      largest_[row] = -__builtin_inff();
      totals_[row] = 0;
    });
  }

  void store_outputs() const {
    const int64_t heads = call_.kv_heads * call_.group;
    for_each_row([&](int64_t row, int64_t token, int64_t head) {
      const int64_t first = (token * heads + head) * call_.value_size;
      const float* output = outputs_ + row * output_stride_;
      // A query without keys gives zeros.
      const Vec factor = splat(totals_[row] == 0 ? 0.0f : 1.0f / totals_[row]);
      const auto value = [=](int64_t d, auto) {
        return mul(Lanes<float>::load(output + d, Full{}), factor);
      };
      if (call_.out_scale == nullptr) {
        T* out = static_cast<T*>(call_.out) + first;
        for_each_vec(call_.value_size, [=](int64_t d, auto part) {
          Lanes<T>::store(out + d, value(d, part), part);
        });
      } else {  // what is quantised is the result as it would have been stored
        uint8_t* out = static_cast<uint8_t*>(call_.out) + first;
        quantise<Fp8>(out, call_.value_size, *call_.out_scale,
                      [=](int64_t d, auto part) { return Lanes<T>::round(value(d, part)); });
      }
    });
  }

  const T* block_of(const void* cache, int64_t stride, int64_t size, int64_t block,
                    int64_t head) const {
    const int32_t* table = call_.block_tables + part_.sequence * call_.block_table_stride;
    return static_cast<const T*>(cache) + table[block] * stride +
           (part_.first_head + head) * call_.block_size * size;
  }

  const T* keys_of(int64_t block, int64_t head) const {
    return block_of(call_.key_cache, call_.key_block_stride, call_.head_size, block, head);
  }

  const T* values_of(int64_t block, int64_t head) const {
    return block_of(call_.value_cache, call_.value_block_stride, call_.value_size, block, head);
  }

  // One kv head of one block; next_block and next_head are what comes after it.
  void visit(int64_t block, int64_t head, int64_t next_block, int64_t next_head) {
    Tile<T, T> tile{keys_of(block, head), values_of(block, head), nullptr, nullptr};
    if (next_block >= 0) {
      tile.next_keys = reinterpret_cast<const char*>(keys_of(next_block, next_head));
      tile.next_values = reinterpret_cast<const char*>(values_of(next_block, next_head));
    }
    const int64_t begin = block * call_.block_size;
    const int64_t end = least(begin + call_.block_size, length_);
    for (int64_t base = begin; base < end; base += kTile) {
      visit_tile(head, base, least(end - base, kTile), tile);
      tile.keys += kTile * call_.head_size;
      tile.values += kTile * call_.value_size;
      if (tile.next_keys != nullptr) {
        tile.next_keys += kTile * call_.head_size * static_cast<int64_t>(sizeof(T));
        tile.next_values += kTile * call_.value_size * static_cast<int64_t>(sizeof(T));
      }
    }
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
    const int64_t begin = most(first_visible(token) - base, 0);
    return {begin, most(least(end_visible(token) - base, count), 0)};
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

  const OpweavePagedAttention& call_;
  const OpweavePagedPart& part_;
  int64_t query_stride_;
  int64_t output_stride_;
  int64_t rows_per_head_;
  int64_t first_query_;     // in the batch
  int64_t first_position_;  // in the sequence
  int64_t length_;
  float* queries_;
  float* outputs_;
  float* wide_keys_;
  float* wide_values_;
  float* largest_;
  float* totals_;
};

void run(const OpweavePagedAttention* call, const OpweavePagedPart* part, float* scratch) {
  with_storage(call->dtype,
               [=](auto storage) { Part<decltype(storage)>(*call, *part, scratch).run(); });
}

int64_t scratch_size(const OpweavePagedAttention* call, int64_t tokens, int64_t heads) {
  return Part<float>::scratch_size(*call, tokens, heads);
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweavePagedAttentionKernels, paged_attention) = {
    scratch_size,
    run,
};
