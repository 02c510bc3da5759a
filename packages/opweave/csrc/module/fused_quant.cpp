// Norms and activations with quantized results: argument checks, then the kernels.
#include "kernels/fused_quant.h"

#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

OpweaveRmsNormQuant rms_norm_call(const View& out, const View& x, const View* weight,
                                  const View& scale, double epsilon) {
  check_activation(x);
  check_quantized(out);
  check_same_sizes(out, x);
  check_disjoint(out, x);
  check_disjoint(out, scale);
  if (weight != nullptr) {
    check_per_column(*weight, x);
    check_disjoint(out, *weight);
  }
  OpweaveRmsNormQuant call;
  call.out = out.data;
  call.x = x.data;
  call.residual_out = nullptr;
  call.residual = nullptr;
  call.weight = weight != nullptr ? weight->data : nullptr;
  call.scales = reinterpret_cast<float*>(scale.data);
  call.rows = rows_of(out, x);
  call.residual_rows = call.rows;
  call.width = x.sizes[x.rank - 1];
  call.epsilon = static_cast<float>(epsilon);
  call.upper_bound = 0;
  call.dtype = x.dtype;
  call.weight_dtype = weight != nullptr ? weight->dtype : x.dtype;
  call.out_dtype = out.dtype;
  return call;
}

// Add the residual to a call: residual_out = x + residual, which may be either of them.
void add_residual(OpweaveRmsNormQuant* call, const View& out, const View& residual_out,
                  const View& x, const View& residual, const View* weight, const View& scale) {
  for (const View* other : {&residual, &residual_out}) {
    check_same_sizes(*other, x);
    check_same_dtype(*other, x);
    check_unit_stride(*other);
    check_disjoint(out, *other);
  }
  check_disjoint_or_same(residual_out, x);
  check_disjoint_or_same(residual_out, residual);
  check_disjoint(residual_out, scale);
  if (weight != nullptr) check_disjoint(residual_out, *weight);
  call->residual_out = residual_out.data;
  call->residual = residual.data;
  call->residual_rows = rows_of(residual_out, residual);
}

void set_row_scales(OpweaveRmsNormQuant* call, const View& scale, const View& x,
                    const View* weight, const View* scale_ub) {
  check_row_scales(scale, x, 1);
  check_disjoint(scale, x);
  if (weight != nullptr) check_disjoint(scale, *weight);
  call->upper_bound = read_bound(scale_ub);
}

void run_static(OpweaveRmsNormQuant* call) {
  for_rows(call->rows.count, call->width, active_kernels().fused_quant->rms_norm_static, call);
}

void run_per_token(OpweaveRmsNormQuant* call) {
  for_rows(call->rows.count, call->width, active_kernels().fused_quant->rms_norm_per_token, call);
}

void rms_norm_static_quant(const View& out, const View& x, const View* weight, const View& scale,
                           double epsilon) {
  check_one_scale(scale);
  OpweaveRmsNormQuant call = rms_norm_call(out, x, weight, scale, epsilon);
  run_static(&call);
}

void rms_norm_per_token_quant(const View& out, const View& scale, const View& x,
                              const View* weight, double epsilon, const View* scale_ub) {
  OpweaveRmsNormQuant call = rms_norm_call(out, x, weight, scale, epsilon);
  set_row_scales(&call, scale, x, weight, scale_ub);
  run_per_token(&call);
}

void fused_add_rms_norm_static_quant(const View& out, const View& residual_out, const View& x,
                                     const View& residual, const View* weight, const View& scale,
                                     double epsilon) {
  check_one_scale(scale);
  OpweaveRmsNormQuant call = rms_norm_call(out, x, weight, scale, epsilon);
  add_residual(&call, out, residual_out, x, residual, weight, scale);
  run_static(&call);
}

void fused_add_rms_norm_per_token_quant(const View& out, const View& scale,
                                        const View& residual_out, const View& x,
                                        const View& residual, const View* weight, double epsilon,
                                        const View* scale_ub) {
  OpweaveRmsNormQuant call = rms_norm_call(out, x, weight, scale, epsilon);
  set_row_scales(&call, scale, x, weight, scale_ub);
  add_residual(&call, out, residual_out, x, residual, weight, scale);
  check_disjoint(scale, residual);
  run_per_token(&call);
}

OpweaveSiluAndMulQuant silu_and_mul_call(const View& out, const View& x, const View& scale) {
  check_activation(x);
  check_quantized(out);
  check_half_of(out, x);
  check_disjoint(out, x);
  check_disjoint(out, scale);
  OpweaveSiluAndMulQuant call;
  call.out = out.data;
  call.x = x.data;
  call.scales = reinterpret_cast<float*>(scale.data);
  call.rows = rows_of(out, x);
  call.width = out.sizes[out.rank - 1];
  call.group_size = 1;
  call.power_of_two = 0;
  call.upper_bound = 0;
  call.dtype = x.dtype;
  call.out_dtype = out.dtype;
  return call;
}

void silu_and_mul_static_quant(const View& out, const View& x, const View& scale) {
  check_one_scale(scale);
  OpweaveSiluAndMulQuant call = silu_and_mul_call(out, x, scale);
  for_rows(call.rows.count, call.width, active_kernels().fused_quant->silu_and_mul_static, &call);
}

void silu_and_mul_per_token_quant(const View& out, const View& scale, const View& x,
                                  const View* scale_ub) {
  OpweaveSiluAndMulQuant call = silu_and_mul_call(out, x, scale);
  check_row_scales(scale, x, 1);
  check_disjoint(scale, x);
  call.upper_bound = read_bound(scale_ub);
  for_rows(call.rows.count, call.width, active_kernels().fused_quant->silu_and_mul_per_token,
           &call);
}

void silu_and_mul_group_quant_fp8(const View& out, const View& scale, const View& x,
                                  int64_t group_size, bool use_ue8m0) {
  OpweaveSiluAndMulQuant call = silu_and_mul_call(out, x, scale);
  check_dtype(out, {OPWEAVE_FLOAT8_E4M3FN});
  const int64_t width = call.width;
  check_group_scales(scale, x, width, group_size);
  check_disjoint(scale, x);
  call.group_size = group_size < width ? group_size : (width > 0 ? width : 1);
  call.power_of_two = use_ue8m0;
  for_rows(call.rows.count, width, active_kernels().fused_quant->silu_and_mul_groups, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "rms_norm_static_quant(Tensor(a!) out, Tensor x, Tensor? weight, Tensor scale, "
      "float epsilon) -> ()",
      opweave::rms_norm_static_quant);
  m.def(
      "rms_norm_per_token_quant(Tensor(a!) out, Tensor(b!) scale, Tensor x, Tensor? weight, "
      "float epsilon, Tensor? scale_ub) -> ()",
      opweave::rms_norm_per_token_quant);
  m.def(
      "fused_add_rms_norm_static_quant(Tensor(a!) out, Tensor(b!) residual_out, Tensor x, "
      "Tensor residual, Tensor? weight, Tensor scale, float epsilon) -> ()",
      opweave::fused_add_rms_norm_static_quant);
  m.def(
      "fused_add_rms_norm_per_token_quant(Tensor(a!) out, Tensor(b!) scale, "
      "Tensor(c!) residual_out, Tensor x, Tensor residual, Tensor? weight, float epsilon, "
      "Tensor? scale_ub) -> ()",
      opweave::fused_add_rms_norm_per_token_quant);
  m.def("silu_and_mul_static_quant(Tensor(a!) out, Tensor x, Tensor scale) -> ()",
        opweave::silu_and_mul_static_quant);
  m.def(
      "silu_and_mul_per_token_quant(Tensor(a!) out, Tensor(b!) scale, Tensor x, "
      "Tensor? scale_ub) -> ()",
      opweave::silu_and_mul_per_token_quant);
  m.def(
      "silu_and_mul_group_quant_fp8(Tensor(a!) out, Tensor(b!) scale, Tensor x, int group_size, "
      "bool use_ue8m0) -> ()",
      opweave::silu_and_mul_group_quant_fp8);
}
