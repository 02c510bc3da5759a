// The loop over tokens of linear layers whose tokens are packed as integers.
#pragma once

#include <algorithm>

#include "module/linear_checks.h"
#include "module/row_checks.h"
#include "module/scratch.h"

namespace opweave {

// Check the operands that these layers share, apart from the weight.
inline void check_packed_operands(const View& out, const View& x, const View& weight,
                                  const View* bias) {
  check_out(out, x, weight);
  if (bias != nullptr) check_bias(*bias, x, weight.sizes[0]);
  check_disjoint(out, x);
  if (bias != nullptr) check_disjoint(out, *bias);
}

// Pack the tokens of x, at most `most` at a time, and run the kernel on them. The caller sets what
// depends on the weight: kept.width, kept.stride and call.weight. `row_bytes` is the size of a row of
// the weight.
template <class Kernels, class Tokens, class Call>
void run_packed(const Kernels& kernels, Tokens& kept, Call& call, const View& out, const View& x,
                int64_t out_features, const View* bias, int64_t most, int64_t row_bytes) {
  kept.x = x.data;
  kept.rows = rows_of(out, x);
  kept.dtype = x.dtype;
  const int64_t tokens = std::min<int64_t>(kept.rows.count, most);
  kept.out = scratch_of(tokens * kept.stride / static_cast<int64_t>(sizeof(float)));
  call.x = kept.out;
  call.kept = &kept;
  call.bias = bias != nullptr ? bias->data : nullptr;
  call.out_features = out_features;
  call.bias_dtype = bias != nullptr ? bias->dtype : x.dtype;
  for (int64_t token = 0; token < kept.rows.count; token += tokens) {
    call.first_token = token;
    call.tokens = std::min(tokens, kept.rows.count - token);
    call.out = out.data + token * call.out_features * out.element_size();
    kernels.keep(token, token + call.tokens, &kept);
    for_rows(call.out_features, row_bytes * work_per_weight(call.tokens) + 1, kernels.linear,
             &call);
  }
}

}  // namespace opweave
