// advance_step_flashattn: prepares the next decode step of every sequence.
//
// Compiled once for the baseline CPU, because the work is one lookup per sequence, which wider
// vectors do not speed up. All rows are checked before the first one is written.
#include "kernels/adv_step_flash.h"

#include <inttypes.h>
#include <stdio.h>

#include <limits>

namespace {

thread_local char problem[256];

// Splits a position into a block of the table and an offset. Block sizes are usually powers of two,
// and a shift is several times faster than a division.
class BlockSize {
 public:
  explicit BlockSize(int64_t size)
      : size_(size), shift_((size & (size - 1)) == 0 ? __builtin_ctzll(size) : -1) {}

  int64_t block(int64_t position) const {
    return shift_ >= 0 ? position >> shift_ : position / size_;
  }

  int64_t slot(int64_t block, int64_t position) const {
    const int64_t offset = shift_ >= 0 ? position & (size_ - 1) : position % size_;
    return block * size_ + offset;
  }

  // Return the largest block number whose slots fit into 64 bits.
  int64_t last_block() const {
    return (std::numeric_limits<int64_t>::max() - (size_ - 1)) / size_;
  }

 private:
  int64_t size_;
  int shift_;
};

template <class Length, class Block>
class Step {
 public:
  explicit Step(const OpweaveAdvanceStep& call)
      : call_(call),
        block_size_(call.block_size),
        seq_lens_(static_cast<Length*>(call.seq_lens)),
        block_tables_(static_cast<const Block*>(call.block_tables)) {}

  const char* run() const {
    const int64_t last_block = block_size_.last_block();
    for (int64_t i = 0; i < call_.num_queries; ++i) {
      const int64_t position = seq_lens_[i];
      if (position < 0 || position == std::numeric_limits<Length>::max()) {
        return bad_length(i, position);
      }
      const int64_t column = block_size_.block(position);
      if (column >= call_.block_table_width) return no_block(i, position, column);
      const int64_t block = table(i)[column];
      if (block < 0 || block > last_block) return bad_block(i, position, column, block);
    }
    for (int64_t i = 0; i < call_.num_queries; ++i) advance(i);
    for (int64_t i = call_.num_queries; i < call_.num_seqs; ++i) pad(i);
    return nullptr;
  }

 private:
  const Block* table(int64_t i) const { return block_tables_ + i * call_.block_table_stride; }

  void advance(int64_t i) const {
    const int64_t position = seq_lens_[i];
    const int64_t block = table(i)[block_size_.block(position)];
    call_.input_tokens[i] = call_.sampled_token_ids[i * call_.sampled_token_stride];
    call_.input_positions[i] = position;
    call_.slot_mapping[i] = block_size_.slot(block, position);
    seq_lens_[i] = static_cast<Length>(position + 1);
  }

  void pad(int64_t i) const {
    call_.input_tokens[i] = 0;
    call_.input_positions[i] = 0;
    call_.slot_mapping[i] = -1;  // skipped by reshape_and_cache
  }

  const char* bad_length(int64_t i, int64_t length) const {
    const char* why = length < 0            ? "it is negative"
                      : sizeof(Length) == 8 ? "no integer counts further"
                                            : "seq_lens cannot count further; use int64";
    snprintf(problem, sizeof(problem), "sequence %" PRId64 ": its length is %" PRId64 ", and %s", i,
             length, why);
    return problem;
  }

  const char* no_block(int64_t i, int64_t position, int64_t column) const {
    snprintf(problem, sizeof(problem),
             "sequence %" PRId64 ": position %" PRId64 " needs block %" PRId64
             " of its table, which has %" PRId64 " blocks of %" PRId64
             " positions; allocate the block before the step",
             i, position, column, call_.block_table_width, call_.block_size);
    return problem;
  }

  const char* bad_block(int64_t i, int64_t position, int64_t column, int64_t block) const {
    snprintf(problem, sizeof(problem),
             "sequence %" PRId64 ": block_tables[%" PRId64 ", %" PRId64 "] is %" PRId64
             ", which is not a valid block for position %" PRId64,
             i, i, column, block, position);
    return problem;
  }

  const OpweaveAdvanceStep& call_;
  BlockSize block_size_;
  Length* seq_lens_;
  const Block* block_tables_;
};

template <class Length>
const char* run_for_blocks(const OpweaveAdvanceStep& call) {
  return call.block_tables_dtype == OPWEAVE_INT64 ? Step<Length, int64_t>(call).run()
                                                  : Step<Length, int32_t>(call).run();
}

}  // namespace

extern "C" const char* opweave_advance_step(const OpweaveAdvanceStep* call) {
  return call->seq_lens_dtype == OPWEAVE_INT64 ? run_for_blocks<int64_t>(*call)
                                               : run_for_blocks<int32_t>(*call);
}
