// The kernels of torch.ops.acme; library.cpp has their schemas.

#pragma once

#include <ATen/core/Tensor.h>

namespace acme {

using at::Tensor;
using std::int64_t;
using MaybeTensor = std::optional<Tensor>;

Tensor rms_norm(const Tensor& given, const MaybeTensor& weight, double epsilon);

void add_rms_norm_(Tensor& x, Tensor& residual, const MaybeTensor& weight, double epsilon);

Tensor silu_and_mul(const Tensor& given);

Tensor scaled_residual(const Tensor& given, const Tensor& given_residual, double scale);

void rotary_embedding_(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& table,
                       bool neox);

Tensor linear(const Tensor& given, const Tensor& given_weight, const MaybeTensor& bias);

Tensor tiled_linear(const Tensor& given, const Tensor& tiles, int64_t out_features,
                    const MaybeTensor& bias);

Tensor embedding(const Tensor& given_ids, const Tensor& given_weight);

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double scale, bool causal,
                 std::optional<int64_t> window, std::optional<double> soft_cap);

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_tables, const Tensor& seq_lens,
                       const Tensor& cu_seqlens_q, double scale, bool causal,
                       std::optional<int64_t> window, std::optional<double> soft_cap);

void reshape_and_cache_(const Tensor& key, const Tensor& value, Tensor& key_cache,
                        Tensor& value_cache, const Tensor& slot_mapping);

}  // namespace acme
