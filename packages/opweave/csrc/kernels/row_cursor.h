// Iterates over the rows of a call, and keeps the byte offset of every operand.
#pragma once

#include "kernels/kernels.h"

namespace {

class RowCursor {
 public:
  RowCursor(const OpweaveRows& rows, int64_t row) : rows_(rows) {
    for (int d = 0; d < rows.rank; ++d) {
      index_[d] = row % rows.sizes[d];
      row /= rows.sizes[d];
      for (int k = 0; k < OPWEAVE_MAX_ROW_OPERANDS; ++k) {
        offsets_[k] += index_[d] * rows.byte_strides[k][d];
      }
    }
  }

  template <class T>
  T* in(T* base, int operand) const {  // T is char or const char
    return base + offsets_[operand];
  }

  void advance() {
    for (int d = 0; d < rows_.rank; ++d) {
      for (int k = 0; k < OPWEAVE_MAX_ROW_OPERANDS; ++k) offsets_[k] += rows_.byte_strides[k][d];
      if (++index_[d] < rows_.sizes[d]) return;
      for (int k = 0; k < OPWEAVE_MAX_ROW_OPERANDS; ++k) {
        offsets_[k] -= rows_.sizes[d] * rows_.byte_strides[k][d];
      }
      index_[d] = 0;
    }
  }

 private:
  const OpweaveRows& rows_;
  int64_t index_[OPWEAVE_MAX_RANK];
  int64_t offsets_[OPWEAVE_MAX_ROW_OPERANDS] = {};
};

}  // namespace
