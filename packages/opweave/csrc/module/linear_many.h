// Linear layers for many tokens.
#pragma once

#include <algorithm>

#include "core/parallel.h"
#include "core/rows.h"
#include "kernels/linear.h"
#include "module/linear_checks.h"
#include "module/row_checks.h"
#include "module/scratch.h"

namespace opweave {

// Return the tokens per call of a kernel for many tokens: whole groups, evenly distributed.
inline int64_t tokens_of_call(int64_t count, int64_t group) {
  const int64_t most = OPWEAVE_LINEAR_MANY_TOKENS / group;
  const int64_t groups = (count + group - 1) / group;
  const int64_t calls = (groups + most - 1) / most;
  return (groups + calls - 1) / calls * group;
}

// Return whether there is a kernel for many tokens, and x has enough tokens for it.
inline bool takes_many(const OpweaveLinearMany& kernels, const View& x, int64_t fewest) {
  const int64_t width = x.sizes[x.rank - 1];
  return kernels.linear != nullptr && width > 0 && x.element_count() / width >= fewest;
}

// Pack the tokens of x and run a kernel for many tokens. `linear` is the call or a part of it; the
// caller sets what depends on weight and bias.
template <class Call>
void run_many(const OpweaveLinearMany& kernels, OpweaveLinear& linear, Call& call, const View& out,
              const View& x) {
  OpweaveLinearTokens kept;
  kept.x = x.data;
  kept.rows = rows_of(out, x);
  kept.width = linear.width;
  kept.dtype = x.dtype;
  kept.weight_dtype = linear.weight_dtype;
  const int64_t tokens = tokens_of_call(kept.rows.count, kernels.group);
  const int64_t group_bytes = kernels.group_bytes(x.dtype);
  linear.x_stride = tokens / kernels.group * group_bytes;
  const int64_t blocks = (linear.width - 1) / kernels.columns + 1;
  float* kept_x = scratch_of(blocks * linear.x_stride / static_cast<int64_t>(sizeof(float)));
  linear.x = kept_x;
  for (int64_t token = 0; token < kept.rows.count; token += tokens) {
    linear.tokens = std::min(tokens, kept.rows.count - token);
    linear.out = out.data + token * linear.out_features * out.element_size();
    const int64_t groups = (linear.tokens + kernels.group - 1) / kernels.group;
    for_rows(groups, kernels.group * linear.width, [&](int64_t begin, int64_t end) {
      OpweaveLinearTokens some = kept;
      some.out = reinterpret_cast<char*>(kept_x) + begin * group_bytes;
      some.stride = linear.x_stride;
      kernels.keep(token + begin * kernels.group,
                   token + std::min(end * kernels.group, linear.tokens), &some);
    });
    for_rows(linear.out_features, linear.width * work_per_weight(linear.tokens) + 1,
             kernels.linear, &call);
  }
}

// The same for weights of few bits, which the caller sets, and tokens in bfloat16.
template <class Call>
void run_many_low_bit(const OpweaveLinearMany& kernels, Call& call, const View& out, const View& x,
                      const View* bias) {
  OpweaveLinear& linear = call.linear;
  linear = {};
  linear.bias = bias != nullptr ? bias->data : nullptr;
  linear.width = x.sizes[x.rank - 1];
  linear.out_features = out.sizes[out.rank - 1];
  linear.dtype = x.dtype;
  linear.weight_dtype = OPWEAVE_UINT8;
  linear.bias_dtype = bias != nullptr ? bias->dtype : x.dtype;
  run_many(kernels, linear, call, out, x);
}

}  // namespace opweave
