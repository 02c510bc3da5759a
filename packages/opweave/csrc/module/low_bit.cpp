// Linear layers with 4-bit weights: argument checks, then the kernels.
#include "kernels/low_bit.h"

#include "module/linear_many.h"
#include "module/module.h"
#include "module/packed_linear.h"

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

OpweaveWeightW4 checked_operands(const View& out, const View& x, const View& weight,
                                 const View& scale, const View* offset, const View* bias) {
  check_activation(x);
  const OpweaveWeightW4 result = checked_weight(weight, scale, offset);
  if (x.sizes[x.rank - 1] != result.width) {
    refuse_shape(x, "[..., " + std::to_string(result.width) +
                        "], twice the last dimension of weight");
  }
  check_packed_operands(out, x, weight, bias);
  check_disjoint_weight(out, weight, scale, offset);
  return result;
}

void multiply_few(const View& out, const View& x, const View& weight, const View& scale,
                  const View* offset, const View* bias, bool is_int8) {
  OpweaveLinearW4 call;
  call.weight = checked_operands(out, x, weight, scale, offset, bias);
  if (out.element_count() == 0) return;

  const OpweaveLowBitKernels& kernels = *active_kernels().low_bit;
  OpweaveLowBitTokens kept;
  kept.width = call.weight.width;
  kept.group = call.weight.group;
  kept.is_int8 = is_int8;
  kept.stride = kernels.token_bytes(x.dtype, kept.width, kept.group, kept.is_int8);
  run_packed(kernels, kept, call, out, x, weight.sizes[0], bias, OPWEAVE_LOW_BIT_TOKENS,
             kept.width / 2);
}

// out = x @ (q * scale + offset).T + bias; weight holds two values q of 4 bits per byte.
void linear_w4a16(const View& out, const View& x, const View& weight, const View& scale,
                  const View* offset, const View* bias) {
  multiply_few(out, x, weight, scale, offset, bias, false);
}

// Like linear_w4a16, but with x rounded to 8 bits, with a scale for 32 columns.
void linear_w4a16_int8(const View& out, const View& x, const View& weight, const View& scale,
                       const View* offset, const View* bias) {
  multiply_few(out, x, weight, scale, offset, bias, true);
}

// Like linear_w4a16, but with at least `fewest` tokens in bfloat16, use the kernel for many tokens,
// if there is one for the groups.
void linear_w4a16_many(const View& out, const View& x, const View& weight, const View& scale,
                       const View* offset, const View* bias, int64_t fewest) {
  OpweaveManyW4 call;
  call.weight = checked_operands(out, x, weight, scale, offset, bias);
  const OpweaveLinearMany& many = active_kernels().low_bit->many;
  const bool fits = x.dtype == OPWEAVE_BFLOAT16 && call.weight.group % OPWEAVE_MANY_W4_GROUP == 0;
  if (!fits || !takes_many(many, x, fewest)) {
    return linear_w4a16(out, x, weight, scale, offset, bias);
  }
  if (out.element_count() > 0) run_many_low_bit(many, call, out, x, bias);
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
  m.def(
      "linear_w4a16_int8(Tensor(a!) out, Tensor x, Tensor weight, Tensor scale, Tensor? offset,"
      " Tensor? bias) -> ()",
      opweave::linear_w4a16_int8);
  m.def(
      "linear_w4a16_many(Tensor(a!) out, Tensor x, Tensor weight, Tensor scale, Tensor? offset,"
      " Tensor? bias, int fewest) -> ()",
      opweave::linear_w4a16_many);
  m.def("widen_w4(Tensor(a!) out, Tensor weight, Tensor scale, Tensor? offset) -> ()",
        opweave::widen_w4);
}
