// rotary_embedding, qk_norm_rope and rope_reshape_and_cache: argument checks, then the kernels.
#include "kernels/rotary.h"

#include "module/cache_write.h"
#include "module/module.h"
#include "module/shapes.h"

namespace opweave {
namespace {

// Return whether x has a dimension for heads: [tokens..., heads, head_size].
bool has_heads_dim(const View& x, const View& positions) { return x.rank == positions.rank + 2; }

// Return x as [tokens..., row], so that rows_of() iterates over its tokens.
View token_rows(const View& x, const View& positions) {
  View rows = x;
  rows.rank = positions.rank + 1;
  return rows;
}

void check_heads(const View& x, const View& positions, int64_t head_size) {
  check_dtype(x, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  const bool fits = x.rank == positions.rank + 1 || has_heads_dim(x, positions);
  bool same_tokens = fits;
  for (int d = 0; same_tokens && d < positions.rank; ++d) {
    same_tokens = x.sizes[d] == positions.sizes[d];
  }
  if (!same_tokens) {
    refuse_shape(x, "[*" + to_string(positions.sizes, positions.rank) +
                        ", heads * head_size] or [*" + to_string(positions.sizes, positions.rank) +
                        ", heads, head_size]");
  }
  const int64_t last = x.sizes[x.rank - 1];
  if (has_heads_dim(x, positions) ? last != head_size : last % head_size != 0) {
    refuse_shape(x, "[..., heads * " + std::to_string(head_size) + "] or [..., heads, " +
                        std::to_string(head_size) + "]");
  }
  check_unit_stride(x);
}

void check_pair(const View& out, const View& x) {
  check_same_sizes(out, x);
  check_same_dtype(out, x);
  check_unit_stride(out);
  check_disjoint_or_same(out, x);
}

void check_cache(const View& cache, const View& x, int64_t head_size) {
  if (cache.dtype != x.dtype) check_dtype(cache, {x.dtype, OPWEAVE_FLOAT32});
  const int64_t size = cache.rank == 2 ? cache.sizes[1] : -1;
  if (size < 0 || size % 2 != 0 || size > head_size) {
    refuse_shape(cache, "[max_position, r] with an even r of at most head_size, " +
                            std::to_string(head_size));
  }
  if (size > OPWEAVE_MAX_ROTARY_SIZE) {
    refuse_shape(cache,
                 "[max_position, r] with r of at most " + std::to_string(OPWEAVE_MAX_ROTARY_SIZE));
  }
  check_unit_stride(cache);
}

template <class Index>
void check_positions_as(const View& positions, int64_t rows) {
  const Index* values = reinterpret_cast<const Index*>(positions.data);
  const int64_t count = positions.element_count();
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= -rows && values[i] < rows) continue;
    throw CheckFailed("position " + std::to_string(values[i]) + " of token " + std::to_string(i) +
                      " is out of bounds for cos_sin_cache with " + std::to_string(rows) +
                      " positions; nothing was changed");
  }
}

void check_positions(const View& positions, int64_t rows) {
  check_dtype(positions, {OPWEAVE_INT64, OPWEAVE_INT32});
  check_contiguous(positions);
  if (positions.dtype == OPWEAVE_INT64) {
    check_positions_as<int64_t>(positions, rows);
  } else {
    check_positions_as<int32_t>(positions, rows);
  }
}

void check_weight(const View& weight, const View& x, int64_t head_size) {
  if (weight.dtype != x.dtype) check_dtype(weight, {x.dtype, OPWEAVE_FLOAT32});
  if (weight.rank != 1 || weight.sizes[0] != head_size) {
    refuse_shape(weight, "[" + std::to_string(head_size) + "], one element for each in a head");
  }
  check_unit_stride(weight);
}

// Return the stride of tokens in bytes, or -1 if it is not uniform.
int64_t token_distance(const OpweaveRows& tokens, int operand) {
  return tokens.rank == 1 ? tokens.byte_strides[operand][0] : -1;
}

int64_t token_width(const View& x, const View& positions) {
  int64_t last = 0;
  for (int d = positions.rank; d < x.rank; ++d) last += (x.sizes[d] - 1) * x.strides[d];
  return (last + 1) * x.element_size();
}

// Return whether two tensors are disjoint slices of the rows of one projection, of any widths.
bool lie_side_by_side(const View& a, const OpweaveRows& a_tokens, int a_operand, const View& b,
                      const OpweaveRows& b_tokens, int b_operand, const View& positions) {
  const int64_t distance = token_distance(a_tokens, a_operand);
  if (distance <= 0 || distance != token_distance(b_tokens, b_operand)) return false;
  int64_t shift = (b.data - a.data) % distance;
  if (shift < 0) shift += distance;
  return shift >= token_width(a, positions) && shift + token_width(b, positions) <= distance;
}

int64_t head_stride(const View& x, const View& positions, int64_t head_size) {
  const int64_t stride = has_heads_dim(x, positions) ? x.strides[x.rank - 2] : head_size;
  return stride * x.element_size();
}

OpweaveHeads heads_of(const View& out, const View& x, const View* weight, const View& positions,
                      int64_t head_size) {
  OpweaveHeads heads;
  heads.out = out.data;
  heads.x = x.data;
  heads.tokens = rows_of(token_rows(out, positions), token_rows(x, positions));
  heads.count = has_heads_dim(x, positions) ? x.sizes[x.rank - 2] : x.sizes[x.rank - 1] / head_size;
  heads.out_stride = head_stride(out, positions, head_size);
  heads.x_stride = head_stride(x, positions, head_size);
  heads.weight = weight != nullptr ? weight->data : nullptr;
  return heads;
}

struct Arguments {
  const View& out_query;
  const View* out_key;  // null: the keys go to a cache
  const View& query;
  const View& key;
  const View& positions;
  const View& cache;
  const View* query_weight;
  const View* key_weight;
  double epsilon;
  int64_t head_size;
  bool is_neox;
};

// Check that an output, operand 0 of its tokens, does not share elements with another tensor.
void check_apart(const View& written, const OpweaveRows& written_tokens, const View& other,
                 const OpweaveRows& tokens, int operand, const View& positions) {
  if (!lie_side_by_side(written, written_tokens, 0, other, tokens, operand, positions)) {
    check_disjoint(written, other);
  }
}

// Check that the outputs do not share elements with tensors of the other heads.
void check_separate(const Arguments& a, const OpweaveRotary& call) {
  const OpweaveRows& query = call.query.tokens;
  const OpweaveRows& key = call.key.tokens;
  if (a.out_key != nullptr) {
    check_apart(a.out_query, query, *a.out_key, key, 0, a.positions);
    check_apart(*a.out_key, key, a.query, query, 1, a.positions);
  }
  check_apart(a.out_query, query, a.key, key, 1, a.positions);
  for (const View* out : {&a.out_query, a.out_key}) {
    if (out == nullptr) continue;
    check_disjoint(*out, a.positions);
    check_disjoint(*out, a.cache);
    for (const View* weight : {a.query_weight, a.key_weight}) {
      if (weight != nullptr) check_disjoint(*out, *weight);
    }
  }
}

OpweaveRotary call_of(const Arguments& a) {
  if (a.head_size < 1) {
    throw CheckFailed("head_size must be positive, found " + std::to_string(a.head_size));
  }
  check_heads(a.query, a.positions, a.head_size);
  check_heads(a.key, a.positions, a.head_size);
  check_same_dtype(a.key, a.query);
  check_pair(a.out_query, a.query);
  if (a.out_key != nullptr) check_pair(*a.out_key, a.key);
  check_cache(a.cache, a.query, a.head_size);
  check_positions(a.positions, a.cache.sizes[0]);
  for (const View* weight : {a.query_weight, a.key_weight}) {
    if (weight != nullptr) check_weight(*weight, a.query, a.head_size);
  }
  const View* weight = a.query_weight != nullptr ? a.query_weight : a.key_weight;
  if (weight != nullptr && a.key_weight != nullptr) check_same_dtype(*a.key_weight, *weight);
  OpweaveRotary call;
  call.query = heads_of(a.out_query, a.query, a.query_weight, a.positions, a.head_size);
  const View& out_key = a.out_key != nullptr ? *a.out_key : a.key;
  call.key = heads_of(out_key, a.key, a.key_weight, a.positions, a.head_size);
  check_separate(a, call);
  call.positions = a.positions.data;
  call.cache = a.cache.data;
  call.cache_rows = a.cache.sizes[0];
  call.cache_stride = a.cache.strides[0];
  call.head_size = a.head_size;
  call.rotary_size = a.cache.sizes[1];
  call.is_neox = a.is_neox ? 1 : 0;
  call.dtype = a.query.dtype;
  call.cache_dtype = a.cache.dtype;
  call.positions_dtype = a.positions.dtype;
  call.epsilon = static_cast<float>(a.epsilon);
  call.weight_dtype = weight != nullptr ? weight->dtype : a.query.dtype;
  return call;
}

void run(const Arguments& a, OpweaveRangeKernel kernel) {
  OpweaveRotary call = call_of(a);
  const int64_t tokens = a.positions.element_count();
  for_rows(tokens, (call.query.count + call.key.count) * a.head_size, kernel, &call);
}

// Rotate the heads of query and key by the angles of their positions; an out may be its input.
void rotary_embedding(const View& out_query, const View& out_key, const View& query,
                      const View& key, const View& positions, const View& cos_sin_cache,
                      int64_t head_size, bool is_neox_style) {
  run({out_query, &out_key, query, key, positions, cos_sin_cache, nullptr, nullptr, 0, head_size,
       is_neox_style},
      active_kernels().rotary->rotary_embedding);
}

// rotary_embedding after rms_norm of every head.
void qk_norm_rope(const View& out_query, const View& out_key, const View& query, const View& key,
                  const View& positions, const View& cos_sin_cache, const View* query_weight,
                  const View* key_weight, double epsilon, int64_t head_size, bool is_neox_style) {
  run({out_query, &out_key, query, key, positions, cos_sin_cache, query_weight, key_weight, epsilon,
       head_size, is_neox_style},
      active_kernels().rotary->qk_norm_rope);
}

// rotary_embedding, with the keys and values written into the slots of their tokens.
void rope_reshape_and_cache(const View& out_query, const View& query, const View& key,
                            const View& value, const View& positions, const View& cos_sin_cache,
                            const View& key_cache, const View& value_cache,
                            const View& slot_mapping, int64_t head_size, bool is_neox_style) {
  if (positions.rank != 1) refuse_shape(positions, "[tokens]");
  OpweaveRotaryToCache call;
  call.rotary = call_of({out_query, nullptr, query, key, positions, cos_sin_cache, nullptr, nullptr,
                         0, head_size, is_neox_style});
  const OpweaveHeads& heads = call.rotary.key;
  const int64_t sizes[] = {key.sizes[0], heads.count, head_size};
  const int64_t strides[] = {key.strides[0], heads.x_stride / key.element_size(), 1};
  View rows = key;
  rows.rank = 3;
  rows.sizes = sizes;
  rows.strides = strides;
  call.cache = cache_write(rows, value, key_cache, value_cache, slot_mapping);
  const View value_tokens = token_rows(value, positions);
  check_apart(out_query, call.rotary.query.tokens, value, rows_of(value_tokens, value_tokens), 1,
              positions);
  for (const View* other : {&key_cache, &value_cache, &slot_mapping}) {
    check_disjoint(out_query, *other);
  }
  for (const View* cache : {&key_cache, &value_cache}) {
    for (const View* other : {&query, &positions, &cos_sin_cache}) check_disjoint(*cache, *other);
  }
  const int64_t elements = (call.rotary.query.count + heads.count) * head_size;
  for_rows(positions.sizes[0], elements + heads.count * value.sizes[2],
           active_kernels().rotary->rope_reshape_and_cache, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "rotary_embedding(Tensor(a!) out_query, Tensor(b!) out_key, Tensor query, Tensor key, "
      "Tensor positions, Tensor cos_sin_cache, int head_size, bool is_neox_style) -> ()",
      opweave::rotary_embedding);
  m.def(
      "qk_norm_rope(Tensor(a!) out_query, Tensor(b!) out_key, Tensor query, Tensor key, "
      "Tensor positions, Tensor cos_sin_cache, Tensor? query_weight, Tensor? key_weight, "
      "float epsilon, int head_size, bool is_neox_style) -> ()",
      opweave::qk_norm_rope);
  m.def(
      "rope_reshape_and_cache(Tensor(a!) out_query, Tensor query, Tensor key, Tensor value, "
      "Tensor positions, Tensor cos_sin_cache, Tensor(b!) key_cache, Tensor(c!) value_cache, "
      "Tensor slot_mapping, int head_size, bool is_neox_style) -> ()",
      opweave::rope_reshape_and_cache);
}
