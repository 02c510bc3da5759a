// advance_step_flashattn for MindSpore.
#include "mindspore/module/module.h"

namespace opweave_mindspore {
namespace {

constexpr const char* kName = "advance_step_flashattn";

void eval(int64_t num_seqs, int64_t num_queries, int64_t block_size, const ms::Tensor& input_tokens,
          const ms::Tensor& sampled_token_ids, const ms::Tensor& input_positions,
          const ms::Tensor& seq_lens, const ms::Tensor& slot_mapping,
          const ms::Tensor& block_tables) {
  run_native(kName, {num_seqs, num_queries, block_size, Argument::updated(input_tokens),
                     Argument::read(sampled_token_ids), Argument::updated(input_positions),
                     Argument::updated(seq_lens), Argument::updated(slot_mapping),
                     Argument::read(block_tables)});
}

pybind11::object advance_step_flashattn(int64_t num_seqs, int64_t num_queries, int64_t block_size,
                                        const ms::Tensor& input_tokens,
                                        const ms::Tensor& sampled_token_ids,
                                        const ms::Tensor& input_positions,
                                        const ms::Tensor& seq_lens, const ms::Tensor& slot_mapping,
                                        const ms::Tensor& block_tables) {
  return call<0>(kName, eval, num_seqs, num_queries, block_size, input_tokens, sampled_token_ids,
                 input_positions, seq_lens, slot_mapping, block_tables);
}

}  // namespace
}  // namespace opweave_mindspore

OPWEAVE_MS_EXTENSION_MODULE(m) {
  using pybind11::arg;
  m.def("advance_step_flashattn", &opweave_mindspore::advance_step_flashattn, arg("num_seqs"),
        arg("num_queries"), arg("block_size"), arg("input_tokens"), arg("sampled_token_ids"),
        arg("input_positions"), arg("seq_lens"), arg("slot_mapping"), arg("block_tables"));
}
