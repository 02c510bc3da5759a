// Rows: every dimension but the last, merged as far as the strides of all operands allow.
#pragma once

#include "types.h"
#include "view.h"

namespace opweave {

// Return the rows of two tensors of the same shape with at least one dimension.
OpweaveRows rows_of(const View& first, const View& second);

}  // namespace opweave
