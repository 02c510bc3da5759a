// Linear layers with 4-bit weights: argument checks, then the kernels.
#include "kernels/low_bit.h"

#include <algorithm>

#include "module/linear_checks.h"
#include "module/module.h"
#include "module/row_checks.h"
#include "module/scratch.h"
#include "module/shapes.h"

namespace opweave {
namespace {

void check_scales(const View& scales, const View& weight) {
  check_unit_stride(scales);
  const int64_t width = 2 * weight.sizes[1];
  const bool fits = scales.rank == 2 && scales.sizes[0] == weight.sizes[0] &&
                    scales.sizes[1] > 0 && width > 0 &&
                    width % (scales.sizes[1] * OPWEAVE_LOW_BIT_GROUP) == 0;
  if (!fits) {
    refuse_shape(scales, "[" + std::to_string(weight.sizes[0]) + ", groups], with groups of a "
                         "multiple of 8 columns of " + std::to_string(width));
  }
}

OpweaveWeightW4 checked_weight(const View& weight, const View& scale, const View* offset) {
  check_dtype(weight, {OPWEAVE_UINT8});
  if (weight.rank != 2) refuse_shape(weight, "[out_features, in_features / 2]");
  check_unit_stride(weight);
  check_dtype(scale, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  check_scales(scale, weight);
  if (offset != nullptr) {
    check_same_dtype(*offset, scale);
    check_same_sizes(*offset, scale);
    check_unit_stride(*offset);
  }
  OpweaveWeightW4 result;
  result.q = reinterpret_cast<const uint8_t*>(weight.data);
  result.scale = scale.data;
  result.offset = offset != nullptr ? offset->data : nullptr;
  result.width = 2 * weight.sizes[1];
  result.group = result.width / scale.sizes[1];
  result.q_stride = weight.strides[0];
  result.scale_stride = scale.strides[0];
  result.offset_stride = offset != nullptr ? offset->strides[0] : 0;
  result.scale_dtype = scale.dtype;
  return result;
}

void check_disjoint_weight(const View& out, const View& weight, const View& scale,
                           const View* offset) {
  check_disjoint(out, weight);
  check_disjoint(out, scale);
  if (offset != nullptr) check_disjoint(out, *offset);
}

// out = x @ (q * scale + offset).T + bias; weight holds two values q of 4 bits per byte.
void linear_w4a16(const View& out, const View& x, const View& weight, const View& scale,
                  const View* offset, const View* bias) {
  check_activation(x);
  OpweaveLinearW4 call;
  call.weight = checked_weight(weight, scale, offset);
  if (x.sizes[x.rank - 1] != call.weight.width) {
    refuse_shape(x, "[..., " + std::to_string(call.weight.width) +
                        "], twice the last dimension of weight");
  }
  check_out(out, x, weight);
  if (bias != nullptr) check_bias(*bias, x, weight.sizes[0]);
  check_disjoint(out, x);
  check_disjoint_weight(out, weight, scale, offset);
  if (bias != nullptr) check_disjoint(out, *bias);
  if (out.element_count() == 0) return;

  const OpweaveLowBitKernels& kernels = *active_kernels().low_bit;
  OpweaveLowBitTokens kept;
  kept.x = x.data;
  kept.rows = rows_of(out, x);
  kept.width = call.weight.width;
  kept.group = call.weight.group;
  kept.stride = kernels.token_bytes(x.dtype, kept.width, kept.group);
  kept.dtype = x.dtype;
  const int64_t tokens = std::min<int64_t>(kept.rows.count, OPWEAVE_LOW_BIT_TOKENS);
  kept.out = scratch_of(tokens * kept.stride / static_cast<int64_t>(sizeof(float)));
  call.x = kept.out;
  call.kept = &kept;
  call.bias = bias != nullptr ? bias->data : nullptr;
  call.out_features = weight.sizes[0];
  call.bias_dtype = bias != nullptr ? bias->dtype : x.dtype;
  for (int64_t token = 0; token < kept.rows.count; token += tokens) {
    call.first_token = token;
    call.tokens = std::min(tokens, kept.rows.count - token);
    call.out = out.data + token * call.out_features * out.element_size();
    kernels.keep(token, token + call.tokens, &kept);
    for_rows(call.out_features, kept.width / 2 * work_per_weight(call.tokens) + 1, kernels.linear,
             &call);
  }
}

// out = q * scale + offset, in float32 or bfloat16.
void widen_w4(const View& out, const View& weight, const View& scale, const View* offset) {
  check_dtype(out, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16});
  OpweaveWidenW4 call;
  call.weight = checked_weight(weight, scale, offset);
  if (out.rank != 2 || out.sizes[0] != weight.sizes[0] || out.sizes[1] != call.weight.width) {
    refuse_shape(out, "[" + std::to_string(weight.sizes[0]) + ", " +
                          std::to_string(call.weight.width) + "], the weights");
  }
  check_contiguous(out);
  check_disjoint_weight(out, weight, scale, offset);
  if (out.element_count() == 0) return;
  call.out = out.data;
  call.out_dtype = out.dtype;
  for_rows(weight.sizes[0], call.weight.width, active_kernels().low_bit->widen, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "linear_w4a16(Tensor(a!) out, Tensor x, Tensor weight, Tensor scale, Tensor? offset,"
      " Tensor? bias) -> ()",
      opweave::linear_w4a16);
  m.def("widen_w4(Tensor(a!) out, Tensor weight, Tensor scale, Tensor? offset) -> ()",
        opweave::widen_w4);
}
