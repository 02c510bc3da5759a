// The schemas of torch.ops.acme, and the questions that Python asks of the driver.

#include <torch/library.h>

#include "../device.h"
#include "../fallback.h"
#include "../memory.h"
#include "ops.h"

namespace acme {
namespace {

std::tuple<int64_t, int64_t> memory_info(int64_t index) {
  const auto [used, limit] = memory_use(checked_device(int(index)));
  return {limit > used ? limit - used : 0, limit};
}

TORCH_LIBRARY(acme, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float epsilon) -> Tensor");
  m.def("add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("scaled_residual(Tensor x, Tensor residual, float scale) -> Tensor");
  m.def(
      "rotary_embedding_(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin_cache, "
      "bool is_neox_style) -> ()");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("tiled_linear(Tensor x, Tensor tiles, int out_features, Tensor? bias) -> Tensor");
  m.def("embedding(Tensor input_ids, Tensor weight) -> Tensor");
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "float scale, bool causal, int? window, float? soft_cap) -> Tensor");
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
      "Tensor seq_lens, Tensor cu_seqlens_q, float scale, bool causal, int? window, "
      "float? soft_cap) -> Tensor");
  m.def(
      "reshape_and_cache_(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()");

  m.def("device_count() -> int", []() -> int64_t { return device_count(); });
  m.def("current_device() -> int", []() -> int64_t { return current_device(); });
  m.def("set_device(int index) -> ()", [](int64_t index) { set_current_device(int(index)); });
  m.def("memory_info(int index) -> (int free, int total)", memory_info);
  m.def("set_memory_limit(int bytes) -> ()", [](int64_t bytes) {
    TORCH_CHECK_VALUE(bytes >= 0, "the memory limit, ", bytes, " bytes, is negative.");
    set_memory_limit(std::size_t(bytes));
  });
  m.def("fallbacks() -> Dict(str, int)", fallbacks);
  m.def("reset_fallbacks() -> ()", reset_fallbacks);
}

TORCH_LIBRARY_IMPL(acme, PrivateUse1, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm_", add_rms_norm_);
  m.impl("silu_and_mul", silu_and_mul);
  m.impl("scaled_residual", scaled_residual);
  m.impl("rotary_embedding_", rotary_embedding_);
  m.impl("linear", linear);
  m.impl("tiled_linear", tiled_linear);
  m.impl("embedding", embedding);
  m.impl("attention", attention);
  m.impl("paged_attention", paged_attention);
  m.impl("reshape_and_cache_", reshape_and_cache_);
}

}  // namespace
}  // namespace acme
