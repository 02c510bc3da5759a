#include "rows.h"

namespace opweave {

OpweaveRows rows_of(const View& first, const View& second) {
  const View* operands[OPWEAVE_MAX_ROW_OPERANDS] = {&first, &second};
  OpweaveRows rows;
  rows.count = 1;
  rows.rank = 0;
  for (int d = first.rank - 2; d >= 0; --d) {
    const int64_t size = first.sizes[d];
    rows.count *= size;
    if (size == 1) continue;
    int64_t strides[OPWEAVE_MAX_ROW_OPERANDS];
    bool merges = rows.rank > 0;
    const int inner = rows.rank - 1;
    for (int k = 0; k < OPWEAVE_MAX_ROW_OPERANDS; ++k) {
      strides[k] = operands[k]->strides[d] * operands[k]->element_size();
      merges = merges && strides[k] == rows.sizes[inner] * rows.byte_strides[k][inner];
    }
    if (merges) {
      rows.sizes[inner] *= size;
      continue;
    }
    rows.sizes[rows.rank] = size;
    for (int k = 0; k < OPWEAVE_MAX_ROW_OPERANDS; ++k) {
      rows.byte_strides[k][rows.rank] = strides[k];
    }
    ++rows.rank;
  }
  return rows;
}

}  // namespace opweave
