// The part of a paged attention call, for all kernels: the addresses of its queries, keys, values
// and outputs, the visible keys of its queries, and the iteration over the cache.
#pragma once

#include "kernels/paged_attention.h"
#include "kernels/prefetch.h"
#include "kernels/quant_row.h"

namespace {

constexpr int64_t kTile = 64;  // keys per step of the online softmax
constexpr int64_t kStep = OPWEAVE_PAGED_STEP;

inline int64_t padded(int64_t size) { return (size + kStep - 1) / kStep * kStep; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Keys and values of one kv head at the positions of a tile.
template <class K, class V>
struct Tile {
  const K* keys;
  const V* values;
  const char* next_keys;  // the memory to prefetch, or null
  const char* next_values;
};

// A row is one query of one head. The rows of a kv head are adjacent: token by token, and for each
// token the heads of the group.
template <class T>
class PagedPart {
 protected:
  PagedPart(const OpweavePagedAttention& call, const OpweavePagedPart& part)
      : call_(call),
        part_(part),
        rows_per_head_(part.tokens * call.group),
        first_query_(call.cu_seqlens_q[part.sequence] + part.first_token),
        length_(call.seq_lens[part.sequence]) {
    const int64_t queries = call.cu_seqlens_q[part.sequence + 1] - call.cu_seqlens_q[part.sequence];
    first_position_ = length_ - queries + part.first_token;
  }

  // A token attends to the positions first_visible() to end_visible(), which may be negative.
  int64_t first_visible(int64_t token) const {
    return call_.window == 0 ? 0 : most(first_position_ + token - call_.window + 1, 0);
  }

  int64_t end_visible(int64_t token) const {
    return call_.is_causal ? first_position_ + token + 1 : length_;
  }

  // Call visit(kv head of the part, row of that head, token, query head) for every row, in order.
  template <class Visit>
  void for_each_row(Visit visit) const {
    for (int64_t head = 0; head < part_.heads; ++head) {
      for (int64_t row = 0; row < rows_per_head_; ++row) {
        visit(head, row, first_query_ + row / call_.group,
              (part_.first_head + head) * call_.group + row % call_.group);
      }
    }
  }

  const T* query_of(int64_t token, int64_t head) const {
    return static_cast<const T*>(call_.query) + token * call_.query_token_stride +
           head * call_.query_head_stride;
  }

  bool sees_keys(int64_t token) const {
    return first_visible(token) < least(end_visible(token), length_);
  }

  // Store a row: the weighted sum of values divided by the sum of the weights.
  void store_output(int64_t token, int64_t head, const float* output, float total) const {
    const int64_t first = (token * call_.kv_heads * call_.group + head) * call_.value_size;
    // A query without keys gives zeros; a query whose scores are all minus infinity gives NaN.
    const Vec factor = splat(sees_keys(token - first_query_) ? 1.0f / total : 0.0f);
    const auto value = [=](int64_t d, auto) {
      return mul(Lanes<float>::load(output + d, Full{}), factor);
    };
    if (call_.out_scale == nullptr) {
      T* out = static_cast<T*>(call_.out) + first;
      for_each_vec(call_.value_size,
                   [=](int64_t d, auto part) { Lanes<T>::store(out + d, value(d, part), part); });
    } else {  // quantize the result after rounding it to the dtype
      uint8_t* out = static_cast<uint8_t*>(call_.out) + first;
      quantize<Fp8>(out, call_.value_size, *call_.out_scale,
                    [=](int64_t d, auto part) { return Lanes<T>::round(value(d, part)); });
    }
  }

  // Call visit(head, position, count, tile) for every tile with visible keys, in memory order:
  // blocks in the outer loop and kv heads in the inner loop.
  template <class Visit>
  void for_each_tile(Visit visit) const {
    const int64_t begin = first_visible(0);
    const int64_t end = most(end_visible(part_.tokens - 1), 0);
    const int64_t last_block = (end + call_.block_size - 1) / call_.block_size;
    for (int64_t block = begin / call_.block_size; block < last_block; ++block) {
      for (int64_t head = 0; head < part_.heads; ++head) {
        const int64_t next = head + 1 < part_.heads ? block : block + 1;
        visit_block(block, head, next < last_block ? next : -1, (head + 1) % part_.heads, visit);
      }
    }
  }

  const OpweavePagedAttention& call_;
  const OpweavePagedPart& part_;
  int64_t rows_per_head_;
  int64_t first_query_;     // in the batch
  int64_t first_position_;  // in the sequence
  int64_t length_;

 private:
  const T* block_of(const void* cache, int64_t stride, int64_t head_stride, int64_t block,
                    int64_t head) const {
    const int32_t* table = call_.block_tables + part_.sequence * call_.block_table_stride;
    return static_cast<const T*>(cache) + table[block] * stride +
           (part_.first_head + head) * head_stride;
  }

  const T* keys_of(int64_t block, int64_t head) const {
    return block_of(call_.key_cache, call_.key_block_stride, call_.key_head_stride, block, head);
  }

  const T* values_of(int64_t block, int64_t head) const {
    return block_of(call_.value_cache, call_.value_block_stride, call_.value_head_stride, block,
                    head);
  }

  // Visit one kv head of one block, followed by next_block and next_head.
  template <class Visit>
  void visit_block(int64_t block, int64_t head, int64_t next_block, int64_t next_head,
                   Visit visit) const {
    Tile<T, T> tile{keys_of(block, head), values_of(block, head), nullptr, nullptr};
    if (next_block >= 0) {
      tile.next_keys = reinterpret_cast<const char*>(keys_of(next_block, next_head));
      tile.next_values = reinterpret_cast<const char*>(values_of(next_block, next_head));
    }
    const int64_t begin = block * call_.block_size;
    const int64_t end = least(begin + call_.block_size, length_);
    for (int64_t base = begin; base < end; base += kTile) {
      visit(head, base, least(end - base, kTile), tile);
      tile.keys += kTile * call_.head_size;
      tile.values += kTile * call_.value_size;
      if (tile.next_keys != nullptr) {
        tile.next_keys += kTile * call_.head_size * static_cast<int64_t>(sizeof(T));
        tile.next_values += kTile * call_.value_size * static_cast<int64_t>(sizeof(T));
      }
    }
  }
};

}  // namespace
