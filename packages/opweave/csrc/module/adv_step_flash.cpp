// advance_step_flashattn: argument checks, then the kernel.
#include "kernels/adv_step_flash.h"

#include "module/module.h"
#include "module/shapes.h"

namespace opweave {
namespace {

void check_counts(int64_t num_seqs, int64_t num_queries, int64_t block_size) {
  if (num_queries < 0 || num_queries > num_seqs) {
    throw CheckFailed("num_queries must be between 0 and num_seqs, " + std::to_string(num_seqs) +
                      ", found " + std::to_string(num_queries));
  }
  if (block_size < 1) {
    throw CheckFailed("block_size must be positive, found " + std::to_string(block_size));
  }
}

void check_per_sequence(const View& view, int64_t num_seqs) {
  if (view.rank != 1 || view.sizes[0] != num_seqs) {
    refuse_shape(view, "[" + std::to_string(num_seqs) + "], one element for each sequence");
  }
  check_unit_stride(view);
}

void check_sampled(const View& view, int64_t num_queries) {
  check_dtype(view, {OPWEAVE_INT64});
  const bool is_column = view.rank == 2 && view.sizes[1] == 1;
  if ((view.rank != 1 && !is_column) || view.sizes[0] != num_queries) {
    const std::string count = std::to_string(num_queries);
    refuse_shape(view, "[" + count + "] or [" + count + ", 1], one token for each query");
  }
}

void check_block_tables(const View& view, int64_t num_seqs) {
  check_dtype(view, {OPWEAVE_INT32, OPWEAVE_INT64});
  if (view.rank != 2 || view.sizes[0] != num_seqs) {
    refuse_shape(view, "[" + std::to_string(num_seqs) + ", blocks], one row for each sequence");
  }
  check_unit_stride(view);
}

// Check that no output shares memory with another tensor of the call.
void check_separate(const View* const (&outputs)[4], const View& sampled_token_ids,
                    const View& block_tables) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) check_disjoint(*outputs[i], *outputs[j]);
    check_disjoint(*outputs[i], sampled_token_ids);
    check_disjoint(*outputs[i], block_tables);
  }
}

void advance_step_flashattn(int64_t num_seqs, int64_t num_queries, int64_t block_size,
                            const View& input_tokens, const View& sampled_token_ids,
                            const View& input_positions, const View& seq_lens,
                            const View& slot_mapping, const View& block_tables) {
  check_counts(num_seqs, num_queries, block_size);
  for (const View* view : {&input_tokens, &input_positions, &slot_mapping}) {
    check_dtype(*view, {OPWEAVE_INT64});
    check_per_sequence(*view, num_seqs);
  }
  check_dtype(seq_lens, {OPWEAVE_INT32, OPWEAVE_INT64});
  check_per_sequence(seq_lens, num_seqs);
  check_sampled(sampled_token_ids, num_queries);
  check_block_tables(block_tables, num_seqs);
  check_separate({&input_tokens, &input_positions, &seq_lens, &slot_mapping}, sampled_token_ids,
                 block_tables);
  OpweaveAdvanceStep call;
  call.num_seqs = num_seqs;
  call.num_queries = num_queries;
  call.block_size = block_size;
  call.input_tokens = reinterpret_cast<int64_t*>(input_tokens.data);
  call.sampled_token_ids = reinterpret_cast<const int64_t*>(sampled_token_ids.data);
  call.sampled_token_stride = sampled_token_ids.strides[0];
  call.input_positions = reinterpret_cast<int64_t*>(input_positions.data);
  call.seq_lens = seq_lens.data;
  call.slot_mapping = reinterpret_cast<int64_t*>(slot_mapping.data);
  call.block_tables = block_tables.data;
  call.block_table_stride = block_tables.strides[0];
  call.block_table_width = block_tables.sizes[1];
  call.seq_lens_dtype = seq_lens.dtype;
  call.block_tables_dtype = block_tables.dtype;
  if (const char* problem = opweave_advance_step(&call)) throw CheckFailed(problem);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "advance_step_flashattn(int num_seqs, int num_queries, int block_size, "
      "Tensor(a!) input_tokens, Tensor sampled_token_ids, Tensor(b!) input_positions, "
      "Tensor(c!) seq_lens, Tensor(d!) slot_mapping, Tensor block_tables) -> ()",
      opweave::advance_step_flashattn);
}
