// paged_attention and attention_quant: argument checks, work partitioning, then the kernel.
#include "kernels/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "module/module.h"
#include "module/row_checks.h"
#include "module/scratch.h"
#include "module/shapes.h"

namespace opweave {
namespace {

// Rows (queries times heads) per part: their float32 state fits the L2 cache, and it is a multiple
// of 6 and 16, the numbers of rows that the kernels multiply at once.
constexpr int64_t kPartRows = 96;
// Parts per thread for load balancing.
constexpr int64_t kEnoughParts = 4;

void check_cache(const View& cache, const View& query) {
  check_same_dtype(cache, query);
  if (cache.rank != 4) refuse_shape(cache, "[blocks, kv_heads, block_size, size]");
  check_contiguous_heads(cache);
}

void check_layout(const View& query, const View& key_cache, const View& value_cache) {
  check_dtype(query, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  if (query.rank != 3) refuse_shape(query, "[tokens, heads, head_size]");
  check_unit_stride(query);
  check_cache(key_cache, query);
  check_cache(value_cache, query);
  const int64_t* keys = key_cache.sizes;
  const int64_t* values = value_cache.sizes;
  if (keys[3] != query.sizes[2] || keys[3] == 0) {
    refuse_shape(key_cache, "[blocks, kv_heads, block_size, " + std::to_string(query.sizes[2]) +
                                "], a positive head size, as query has it");
  }
  if (!std::equal(keys, keys + 3, values)) {
    refuse_shape(value_cache, "[" + std::to_string(keys[0]) + ", " + std::to_string(keys[1]) +
                                  ", " + std::to_string(keys[2]) +
                                  ", value_size], as key_cache has it");
  }
  if (keys[1] == 0 || query.sizes[1] % keys[1] != 0) {
    refuse_shape(query, "[tokens, a multiple of " + std::to_string(keys[1]) +
                            " heads, head_size], because key_cache has that many");
  }
  if (keys[2] == 0 || keys[2] % OPWEAVE_PAGED_STEP != 0) {
    refuse_shape(key_cache, "[blocks, kv_heads, a multiple of " +
                                std::to_string(OPWEAVE_PAGED_STEP) + ", head_size]");
  }
}

void check_sizes(const View& out, std::initializer_list<int64_t> sizes) {
  const int rank = static_cast<int>(sizes.size());
  if (out.rank != rank || !std::equal(sizes.begin(), sizes.end(), out.sizes)) {
    refuse_shape(out, to_string(sizes.begin(), rank));
  }
  check_contiguous(out);
}

void check_vector(const View& view, int64_t count) {
  check_dtype(view, {OPWEAVE_INT32});
  if (view.rank != 1 || view.sizes[0] != count) {
    refuse_shape(view, "[" + std::to_string(count) + "]");
  }
  check_contiguous(view);
}

std::string of_sequence(int64_t i) { return "sequence " + std::to_string(i) + ": "; }

// Check all lengths, blocks and query ranges, so that the kernel can rely on them.
void check_sequences(const View& block_tables, const OpweavePagedAttention& call, int64_t blocks,
                     int64_t tokens) {
  const int64_t sequences = block_tables.sizes[0];
  const int32_t* starts = call.cu_seqlens_q;
  if (starts[0] != 0 || starts[sequences] > tokens) {
    throw CheckFailed("cu_seqlens_q must go from 0 to at most " + std::to_string(tokens) +
                      ", the number of queries, found " + std::to_string(starts[0]) + " to " +
                      std::to_string(starts[sequences]));
  }
  for (int64_t i = 0; i < sequences; ++i) {
    if (starts[i + 1] < starts[i]) {
      throw CheckFailed(of_sequence(i) + "its queries go from " + std::to_string(starts[i]) +
                        " to " + std::to_string(starts[i + 1]) + " in cu_seqlens_q");
    }
    const int64_t length = call.seq_lens[i];
    if (length < 0 || length > block_tables.sizes[1] * call.block_size) {
      throw CheckFailed(of_sequence(i) + "its length is " + std::to_string(length) +
                        ", but its table has " + std::to_string(block_tables.sizes[1]) +
                        " blocks of " + std::to_string(call.block_size) + " positions");
    }
    const int32_t* table = call.block_tables + i * call.block_table_stride;
    for (int64_t j = 0; j * call.block_size < length; ++j) {
      if (table[j] >= 0 && table[j] < blocks) continue;
      throw CheckFailed(of_sequence(i) + "block_tables[" + std::to_string(i) + ", " +
                        std::to_string(j) + "] is " + std::to_string(table[j]) +
                        ", but the cache has " + std::to_string(blocks) + " blocks");
    }
  }
}

// The parts of a call, and the size of the largest. The partitioning does not affect the results.
// All tokens of a head come before the next head, because the CPU caches cannot hold the keys of
// all heads.
struct Plan {
  std::vector<OpweavePagedPart> parts;
  int64_t tokens = 1;  // per part, at most
  int64_t heads = 1;
  int64_t keys = 0;  // read by all parts, per kv head
};

Plan plan_of(const OpweavePagedAttention& call, int64_t sequences) {
  Plan plan;
  const int64_t most_tokens = std::max<int64_t>(1, kPartRows / call.group);
  int64_t cuts = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t queries = call.cu_seqlens_q[i + 1] - call.cu_seqlens_q[i];
    cuts += (queries + most_tokens - 1) / most_tokens;
    plan.tokens = std::max(plan.tokens, std::min(queries, most_tokens));
  }
  const int64_t fitting = std::max<int64_t>(1, kPartRows / (plan.tokens * call.group));
  const int64_t threads = thread_count();
  // The heads of a part share its lanes, so they are only split as far as necessary to occupy all
  // threads: the heads of each sequence over all threads, or those of many sequences over enough
  // parts.
  const int64_t of_each = (call.kv_heads + threads - 1) / threads;
  const int64_t of_all = call.kv_heads * cuts / (threads * kEnoughParts);
  plan.heads = std::min({fitting, std::max(of_each, of_all), call.kv_heads});
  plan.parts.reserve(static_cast<size_t>(cuts * ((call.kv_heads - 1) / plan.heads + 1)));
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t queries = call.cu_seqlens_q[i + 1] - call.cu_seqlens_q[i];
    plan.keys += call.seq_lens[i] * ((queries + plan.tokens - 1) / plan.tokens);
    for (int64_t head = 0; head < call.kv_heads; head += plan.heads) {
      const int64_t heads = std::min(plan.heads, call.kv_heads - head);
      for (int64_t token = 0; token < queries; token += plan.tokens) {
        plan.parts.push_back({i, token, std::min(plan.tokens, queries - token), head, heads});
      }
    }
  }
  return plan;
}

void run_parts(const OpweavePagedAttention& call, const Plan& plan) {
  const OpweavePagedAttentionKernels& kernels = *active_kernels().paged_attention;
  const int64_t floats = kernels.scratch_size(&call, plan.tokens, plan.heads);
  const int64_t count = static_cast<int64_t>(plan.parts.size());
  const int64_t elements =
      plan.keys * call.kv_heads * call.group * (call.head_size + call.value_size) / count;
  // Parts differ in size, so threads take them dynamically.
  std::atomic<int64_t> next{0};
  for_rows(count, elements + 1, [&](int64_t, int64_t) {
    float* scratch = scratch_or_null(floats);
    if (scratch == nullptr) return;  // other threads take its parts
    for (int64_t i = next++; i < count; i = next++) {
      kernels.run(&call, &plan.parts[static_cast<size_t>(i)], scratch);
    }
  });
  if (next < count) fail_without_scratch(floats);
}

// Return the byte that represents a zero output: 0, or the quantized code of 0 / out_scale.
int stored_zero(const float* out_scale) {
  if (out_scale == nullptr) return 0;
  const float zero = 0.0f * (1.0f / *out_scale);
  if (zero != zero) return 0x7f;
  return std::signbit(zero) ? 0x80 : 0;
}

struct Options {
  double scale;
  bool causal;
  std::optional<int64_t> window;
  std::optional<double> soft_cap;
};

// Check everything except the shape of out and out_scale, and run the kernel.
void attend(const View& out, const float* out_scale, const View& query, const View& key_cache,
            const View& value_cache, const View& block_tables, const View& seq_lens,
            const View& cu_seqlens_q, const Options& options) {
  check_dtype(block_tables, {OPWEAVE_INT32});
  if (block_tables.rank != 2) refuse_shape(block_tables, "[sequences, blocks]");
  check_unit_stride(block_tables);
  check_vector(seq_lens, block_tables.sizes[0]);
  check_vector(cu_seqlens_q, block_tables.sizes[0] + 1);
  const std::optional<int64_t>& window = options.window;
  if (window.has_value() && (*window < 1 || !options.causal)) {
    throw CheckFailed("window must be None or, with causal, positive, found " +
                      std::to_string(*window) + (options.causal ? "" : " without causal"));
  }
  const std::optional<double>& soft_cap = options.soft_cap;
  if (soft_cap.has_value() && !(*soft_cap > 0)) {
    throw CheckFailed("soft_cap must be None or positive, found " + std::to_string(*soft_cap));
  }
  for (const View* other :
       {&query, &key_cache, &value_cache, &block_tables, &seq_lens, &cu_seqlens_q}) {
    check_disjoint(out, *other);
  }
  OpweavePagedAttention call;
  call.out = out.data;
  call.out_scale = out_scale;
  call.query = query.data;
  call.key_cache = key_cache.data;
  call.value_cache = value_cache.data;
  call.block_tables = reinterpret_cast<const int32_t*>(block_tables.data);
  call.seq_lens = reinterpret_cast<const int32_t*>(seq_lens.data);
  call.cu_seqlens_q = reinterpret_cast<const int32_t*>(cu_seqlens_q.data);
  call.block_table_stride = block_tables.strides[0];
  call.query_token_stride = query.strides[0];
  call.query_head_stride = query.strides[1];
  call.key_block_stride = key_cache.strides[0];
  call.value_block_stride = value_cache.strides[0];
  call.key_head_stride = key_cache.strides[1];
  call.value_head_stride = value_cache.strides[1];
  call.kv_heads = key_cache.sizes[1];
  call.group = query.sizes[1] / key_cache.sizes[1];
  call.head_size = query.sizes[2];
  call.value_size = value_cache.sizes[3];
  call.block_size = key_cache.sizes[2];
  // Lengths have 32 bits.
  call.window = std::min<int64_t>(window.value_or(0), std::numeric_limits<int32_t>::max());
  call.is_causal = options.causal ? 1 : 0;
  call.scale = static_cast<float>(options.scale);
  // Zero means no cap, so a cap that underflows to zero is raised; all scores are close to zero
  // then.
  call.soft_cap =
      soft_cap.has_value()
          ? std::max(static_cast<float>(*soft_cap), std::numeric_limits<float>::min())
          : 0.0f;
  call.dtype = query.dtype;
  check_sequences(block_tables, call, key_cache.sizes[0], query.sizes[0]);
  const int64_t row_bytes = query.sizes[1] * call.value_size * out.element_size();
  const int64_t used = call.cu_seqlens_q[block_tables.sizes[0]];
  if (out.element_count() == 0) return;
  std::memset(out.data + used * row_bytes, stored_zero(out_scale),
              static_cast<size_t>((query.sizes[0] - used) * row_bytes));
  const Plan plan = plan_of(call, block_tables.sizes[0]);
  if (!plan.parts.empty()) run_parts(call, plan);
}

// out[token] = attention of the token's query over the cached keys of its sequence.
void paged_attention(const View& out, const View& query, const View& key_cache,
                     const View& value_cache, const View& block_tables, const View& seq_lens,
                     const View& cu_seqlens_q, double scale, bool causal,
                     std::optional<int64_t> window, std::optional<double> soft_cap) {
  check_layout(query, key_cache, value_cache);
  check_same_dtype(out, query);
  check_sizes(out, {query.sizes[0], query.sizes[1], value_cache.sizes[3]});
  attend(out, nullptr, query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q,
         {scale, causal, window, soft_cap});
}

// paged_attention, quantized by one scale.
void attention_quant(const View& out, const View& query, const View& key_cache,
                     const View& value_cache, const View& block_tables, const View& seq_lens,
                     const View& cu_seqlens_q, const View& out_scale, double scale, bool causal,
                     std::optional<int64_t> window, std::optional<double> soft_cap) {
  check_layout(query, key_cache, value_cache);
  check_dtype(out, {OPWEAVE_FLOAT8_E4M3FN});
  check_sizes(out, {query.sizes[0], query.sizes[1] * value_cache.sizes[3]});
  check_one_scale(out_scale);
  check_disjoint(out, out_scale);
  attend(out, reinterpret_cast<const float*>(out_scale.data), query, key_cache, value_cache,
         block_tables, seq_lens, cu_seqlens_q, {scale, causal, window, soft_cap});
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, "
      "Tensor block_tables, Tensor seq_lens, Tensor cu_seqlens_q, float scale, bool causal, "
      "int? window, float? soft_cap) -> ()",
      opweave::paged_attention);
  m.def(
      "attention_quant(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, "
      "Tensor block_tables, Tensor seq_lens, Tensor cu_seqlens_q, Tensor out_scale, float scale, "
      "bool causal, int? window, float? soft_cap) -> ()",
      opweave::attention_quant);
}
