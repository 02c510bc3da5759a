// Attention over packed sequences and over a paged cache, and what writes into that cache.

#include <ATen/ops/empty.h>

#include <cstring>

#include "../kernels/attention.h"
#include "checks.h"
#include "ops.h"

namespace acme {
namespace {

const int* offsets(const char* name, const Tensor& t, const Tensor& like, int64_t count) {
  check(name, t, like);
  check_dtype(name, t, at::kInt);
  check_shape(name, t, {count});
  return t.const_data_ptr<int>();
}

struct Options {
  double scale;
  bool causal;
  std::optional<int64_t> window;
  std::optional<double> soft_cap;

  kernels::Scores scores() const { return {float(scale), float(soft_cap.value_or(0.0))}; }

  // The keys [first, last) that the query at `position` of a sequence of `length` sees.
  std::pair<int64_t, int64_t> visible(int64_t position, int64_t length) const {
    const int64_t last = causal ? std::min(position + 1, length) : length;
    return {window ? std::max<int64_t>(position + 1 - *window, 0) : 0, last};
  }
};

// Queries (tokens, heads, size) of sequences whose first queries are at starts[0..sequences]; each
// calls `keys(s)` for its length and the rows of its keys and values by position and head.
template <class T, class Keys>
void attend_all(Tensor& out, const Tensor& query, const int* starts, int64_t sequences,
                int64_t kv_heads, const Options& options, Keys keys) {
  const int64_t heads = query.size(1), group = heads / kv_heads;
  std::vector<float> scratch;
  int64_t done = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    TORCH_CHECK(starts[s] == done && starts[s + 1] >= done && starts[s + 1] <= query.size(0),
                "cu_seqlens_q must begin at 0, not decrease, and end at the number of queries.");
    const auto [length, key_of, value_of] = keys(s);
    const int64_t cached = length - (starts[s + 1] - starts[s]);
    for (; done < starts[s + 1]; ++done) {
      const auto [first, last] = options.visible(cached + done - starts[s], length);
      for (int64_t h = 0; h < heads; ++h) {
        kernels::attend(
            out.mutable_data_ptr<T>() + done * out.stride(0) + h * out.stride(1),
            query.const_data_ptr<T>() + done * query.stride(0) + h * query.stride(1),
            [&, head = h / group](int64_t k) { return key_of(k, head); },
            [&, head = h / group](int64_t k) { return value_of(k, head); }, first, last,
            query.size(2), out.size(2), options.scores(), scratch);
      }
    }
  }
}

void check_heads(const Tensor& query, int64_t kv_heads, int64_t value_heads, const Tensor& key) {
  TORCH_CHECK(kv_heads > 0 && kv_heads == value_heads && query.size(1) % kv_heads == 0,
              query.size(1), " query heads, ", kv_heads, " key heads and ", value_heads,
              " value heads do not fit.");
  TORCH_CHECK(query.size(2) == key.size(-1), "queries have ", query.size(2),
              " elements per head, and keys ", key.size(-1), ".");
}

}  // namespace

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double scale, bool causal,
                 std::optional<int64_t> window, std::optional<double> soft_cap) {
  TORCH_CHECK(query.dim() == 3 && key.dim() == 3 && value.dim() == 3,
              "query, key and value must be (tokens, heads, size).");
  for (const auto& [name, t] : {std::pair("query", query), {"key", key}, {"value", value}}) {
    check(name, t, query);
    check_dtype(name, t, query.scalar_type());
  }
  check_heads(query, key.size(1), value.size(1), key);
  const int64_t sequences = cu_seqlens_q.numel() - 1;
  const int* const starts = offsets("cu_seqlens_q", cu_seqlens_q, query, sequences + 1);
  const int* const k_starts = offsets("cu_seqlens_k", cu_seqlens_k, query, sequences + 1);
  Tensor out = at::empty({query.size(0), query.size(1), value.size(2)}, query.options()).zero_();
  ACME_FLOATS(query.scalar_type(), "attention", [&] {
    const auto* const k_data = key.const_data_ptr<scalar_t>();
    const auto* const v_data = value.const_data_ptr<scalar_t>();
    attend_all<scalar_t>(
        out, query, starts, sequences, key.size(1), {scale, causal, window, soft_cap},
        [&](int64_t s) {
          const int64_t start = k_starts[s], end = k_starts[s + 1];
          TORCH_CHECK(0 <= start && start <= end && end <= std::min(key.size(0), value.size(0)),
                      "cu_seqlens_k must not decrease, and end at the number of keys.");
          return std::tuple(
              end - start,
              [=, &key](int64_t k, int64_t h) {
                return k_data + (start + k) * key.stride(0) + h * key.stride(1);
              },
              [=, &value](int64_t k, int64_t h) {
                return v_data + (start + k) * value.stride(0) + h * value.stride(1);
              });
        });
  });
  return out;
}

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_tables, const Tensor& seq_lens,
                       const Tensor& cu_seqlens_q, double scale, bool causal,
                       std::optional<int64_t> window, std::optional<double> soft_cap) {
  TORCH_CHECK(query.dim() == 3 && key_cache.dim() == 4 && value_cache.dim() == 4 &&
                  value_cache.sizes().slice(0, 3) == key_cache.sizes().slice(0, 3),
              "query must be (tokens, heads, size), the caches (blocks, heads, block_size, size).");
  for (const auto& [name, t] :
       {std::pair("query", query), {"key_cache", key_cache}, {"value_cache", value_cache}}) {
    check(name, t, query);
    check_dtype(name, t, query.scalar_type());
  }
  check_heads(query, key_cache.size(1), value_cache.size(1), key_cache);
  check("block_tables", block_tables, query);
  check_dtype("block_tables", block_tables, at::kInt);
  const int64_t sequences = seq_lens.numel(), block_size = key_cache.size(2);
  check_shape("block_tables", block_tables, {sequences, block_tables.size(-1)});
  const int* const lengths = offsets("seq_lens", seq_lens, query, sequences);
  const int* const starts = offsets("cu_seqlens_q", cu_seqlens_q, query, sequences + 1);
  Tensor out =
      at::empty({query.size(0), query.size(1), value_cache.size(3)}, query.options()).zero_();
  ACME_FLOATS(query.scalar_type(), "paged_attention", [&] {
    const auto row = [block_size](const Tensor& cache, const int* table, int64_t k, int64_t h) {
      return cache.const_data_ptr<scalar_t>() + table[k / block_size] * cache.stride(0) +
             h * cache.stride(1) + k % block_size * cache.stride(2);
    };
    attend_all<scalar_t>(
        out, query, starts, sequences, key_cache.size(1), {scale, causal, window, soft_cap},
        [&](int64_t s) {
          const int64_t length = lengths[s];
          const int* const table = block_tables.const_data_ptr<int>() + s * block_tables.stride(0);
          TORCH_CHECK(0 <= length && length <= block_tables.size(1) * block_size,
                      "seq_lens: ", length, " does not fit the block table.");
          for (int64_t b = 0; b * block_size < length; ++b) {
            TORCH_CHECK_INDEX(0 <= table[b] && table[b] < key_cache.size(0), "block ", table[b],
                              " is not in the cache of ", key_cache.size(0), ".");
          }
          return std::tuple(
              length, [=, &key_cache](int64_t k, int64_t h) { return row(key_cache, table, k, h); },
              [=, &value_cache](int64_t k, int64_t h) { return row(value_cache, table, k, h); });
        });
  });
  return out;
}

namespace {

// Writes row t of `x`, (tokens, heads, size), to slot slots[t] of `cache`; -1 is written nowhere.
void write(const char* name, const Tensor& x, Tensor& cache, const Tensor& slots) {
  check(name, x, cache);
  check(name, cache, cache);
  check("slot_mapping", slots, cache);
  check_dtype("slot_mapping", slots, at::kLong);
  check_dtype(name, x, cache.scalar_type());
  TORCH_CHECK(cache.dim() == 4, "a cache must be (blocks, heads, block_size, size).");
  check_shape(name, x, {slots.numel(), cache.size(1), cache.size(3)});
  const int64_t block_size = cache.size(2), item = cache.element_size();
  auto* const to = static_cast<char*>(cache.mutable_data_ptr());
  const auto* const from = static_cast<const char*>(x.const_data_ptr());
  for (int64_t t = 0; t < slots.numel(); ++t) {
    const int64_t slot = slots.const_data_ptr<int64_t>()[t];
    if (slot == -1) continue;
    TORCH_CHECK_INDEX(0 <= slot && slot < cache.size(0) * block_size, "slot ", slot,
                      " is not in the cache of ", cache.size(0) * block_size, ".");
    for (int64_t h = 0; h < cache.size(1); ++h) {
      const int64_t place = slot / block_size * cache.stride(0) + h * cache.stride(1) +
                            slot % block_size * cache.stride(2);
      std::memcpy(to + place * item, from + (t * x.stride(0) + h * x.stride(1)) * item,
                  cache.size(3) * item);
    }
  }
}

}  // namespace

void reshape_and_cache_(const Tensor& key, const Tensor& value, Tensor& key_cache,
                        Tensor& value_cache, const Tensor& slot_mapping) {
  write("key", key, key_cache, slot_mapping);
  write("value", value, value_cache, slot_mapping);
}

}  // namespace acme
