// The plain C interface of advance_step_flashattn; see kernels.h for the rules.
#pragma once

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// One decode step for every sequence. The vectors have num_seqs contiguous elements, except for the
// num_queries sampled tokens; rows from num_queries on are padding. Strides are in elements.
struct OpweaveAdvanceStep {
  int64_t num_seqs;
  int64_t num_queries;
  int64_t block_size;
  int64_t* input_tokens;
  const int64_t* sampled_token_ids;
  int64_t sampled_token_stride;
  int64_t* input_positions;
  void* seq_lens;
  int64_t* slot_mapping;
  const void* block_tables;
  int64_t block_table_stride;
  int64_t block_table_width;
  enum OpweaveDtype seq_lens_dtype;      // OPWEAVE_INT32 or OPWEAVE_INT64
  enum OpweaveDtype block_tables_dtype;  // OPWEAVE_INT32 or OPWEAVE_INT64
};

// Returns null, or why a sequence cannot advance; nothing is written in that case. The text is
// valid until the thread's next call.
const char* opweave_advance_step(const struct OpweaveAdvanceStep* call);

#ifdef __cplusplus
}
#endif
