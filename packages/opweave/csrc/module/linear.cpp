// Linear layers, and widening of weights for torch's product: argument checks, then the kernels.
#include "kernels/linear.h"

#include <algorithm>

#include "module/linear_checks.h"
#include "module/linear_many.h"
#include "module/module.h"
#include "module/row_checks.h"
#include "module/scratch.h"
#include "module/shapes.h"

namespace opweave {
namespace {

void check_weight_shape(const View& weight, const View& x) {
  const int64_t width = x.sizes[x.rank - 1];
  if (weight.rank != 2 || weight.sizes[1] != width) {
    refuse_shape(weight, "[out_features, " + std::to_string(width) + "], the last dimension of x");
  }
  check_unit_stride(weight);
}

void check_scale(const View& scale, int64_t out_features) {
  check_dtype(scale, {OPWEAVE_FLOAT32});
  check_contiguous(scale);
  if (scale.element_count() == 1) return;
  const bool is_column = scale.rank == 2 && scale.sizes[1] == 1;
  if ((scale.rank != 1 && !is_column) || scale.sizes[0] != out_features) {
    refuse_shape(scale, "[1] or [" + std::to_string(out_features) +
                          "], one element or one per row of weight");
  }
}

int64_t scale_stride_of(const View& scale) { return scale.element_count() > 1 ? 1 : 0; }

// Return the row stride of x in bytes, with room for a whole step (four cache lines) at the end. It
// is an odd number of cache lines: with a power-of-two stride, all tokens would map to the same few
// cache sets.
int64_t x_stride_of(int64_t width) {
  const int64_t bytes = width * static_cast<int64_t>(sizeof(float));
  const int64_t lines = bytes / OPWEAVE_LINEAR_ALIGNMENT + 5;
  return (lines | 1) * OPWEAVE_LINEAR_ALIGNMENT;
}

OpweaveLinearTokens tokens_of(const View& out, const View& x, const View& weight) {
  OpweaveLinearTokens tokens;
  tokens.x = x.data;
  tokens.rows = rows_of(out, x);
  tokens.width = x.sizes[x.rank - 1];
  tokens.dtype = x.dtype;
  tokens.weight_dtype = weight.dtype;
  return tokens;
}

OpweaveLinear call_of(const View& x, const View& weight, const View* scale, const View* bias) {
  OpweaveLinear call;
  call.weight = weight.data;
  call.scale = scale != nullptr ? reinterpret_cast<const float*>(scale->data) : nullptr;
  call.bias = bias != nullptr ? bias->data : nullptr;
  call.width = x.sizes[x.rank - 1];
  call.out_features = weight.sizes[0];
  call.weight_stride = weight.strides[0];
  call.scale_stride = scale != nullptr ? scale_stride_of(*scale) : 0;
  call.dtype = x.dtype;
  call.weight_dtype = weight.dtype;
  call.bias_dtype = bias != nullptr ? bias->dtype : x.dtype;
  return call;
}

void check_operands(const View& out, const View& x, const View& weight, const View* scale,
                    const View* bias) {
  check_out(out, x, weight);
  if (scale != nullptr) check_scale(*scale, weight.sizes[0]);
  if (bias != nullptr) check_bias(*bias, x, weight.sizes[0]);
  check_disjoint(out, x);
  check_disjoint(out, weight);
  if (scale != nullptr) check_disjoint(out, *scale);
  if (bias != nullptr) check_disjoint(out, *bias);
}

void run(const View& out, const View& x, const View& weight, const View* scale, const View* bias) {
  check_operands(out, x, weight, scale, bias);
  if (out.element_count() == 0) return;
  OpweaveLinearTokens kept = tokens_of(out, x, weight);
  kept.stride = x_stride_of(kept.width);
  const int64_t tokens = std::min<int64_t>(kept.rows.count, OPWEAVE_LINEAR_TOKENS);
  kept.out = scratch_of(tokens * kept.stride / static_cast<int64_t>(sizeof(float)));
  OpweaveLinear call = call_of(x, weight, scale, bias);
  call.x = kept.out;
  call.x_stride = kept.stride;
  const OpweaveLinearKernels& kernels = *active_kernels().linear;
  for (int64_t token = 0; token < kept.rows.count; token += tokens) {
    call.tokens = std::min(tokens, kept.rows.count - token);
    call.out = out.data + token * call.out_features * out.element_size();
    kernels.keep(token, token + call.tokens, &kept);
    for_rows(call.out_features, call.width * work_per_weight(call.tokens) + 1, kernels.linear,
             &call);
  }
}

// Run a linear layer with a kernel for many tokens.
void run_many(const OpweaveLinearMany& kernels, const View& out, const View& x, const View& weight,
              const View* scale, const View* bias) {
  check_operands(out, x, weight, scale, bias);
  if (out.element_count() == 0) return;
  OpweaveLinear call = call_of(x, weight, scale, bias);
  run_many(kernels, call, call, out, x);
}

void check_linear(const View& x, const View& weight) {
  check_activation(x);
  check_same_dtype(weight, x);
  check_weight_shape(weight, x);
}

// out = x @ weight.T + bias.
void linear(const View& out, const View& x, const View& weight, const View* bias) {
  check_linear(x, weight);
  run(out, x, weight, nullptr, bias);
}

// Like linear, but with at least `fewest` tokens, use the kernel for many tokens, if there is one.
void linear_many(const View& out, const View& x, const View& weight, const View* bias,
                 int64_t fewest) {
  check_linear(x, weight);
  const OpweaveLinearMany& many = active_kernels().linear->many;
  if (takes_many(many, x, fewest)) return run_many(many, out, x, weight, nullptr, bias);
  run(out, x, weight, nullptr, bias);
}

void check_w8a16(const View& x, const View& weight) {
  check_activation(x);
  check_dtype(weight, {OPWEAVE_INT8, OPWEAVE_FLOAT8_E4M3FN});
  check_weight_shape(weight, x);
}

// out = x @ (weight * scale).T + bias; weight is int8 or float8_e4m3fn.
void linear_w8a16(const View& out, const View& x, const View& weight, const View& scale,
                  const View* bias) {
  check_w8a16(x, weight);
  run(out, x, weight, &scale, bias);
}

// Like linear_w8a16, but with at least `fewest` tokens, use the kernel for many tokens, if there is
// one.
void linear_w8a16_many(const View& out, const View& x, const View& weight, const View& scale,
                       const View* bias, int64_t fewest) {
  check_w8a16(x, weight);
  const OpweaveLinearMany& many = active_kernels().linear->many_w8;
  if (takes_many(many, x, fewest)) return run_many(many, out, x, weight, &scale, bias);
  run(out, x, weight, &scale, bias);
}

// out = weight * scale, in float32; weight is int8 or float8_e4m3fn.
void widen_rows(const View& out, const View& weight, const View& scale) {
  check_dtype(out, {OPWEAVE_FLOAT32});
  check_dtype(weight, {OPWEAVE_INT8, OPWEAVE_FLOAT8_E4M3FN});
  if (weight.rank != 2) refuse_shape(weight, "[out_features, in_features]");
  check_unit_stride(weight);
  check_same_sizes(out, weight);
  check_contiguous(out);
  check_scale(scale, weight.sizes[0]);
  check_disjoint(out, weight);
  check_disjoint(out, scale);
  if (out.element_count() == 0) return;
  OpweaveWidenRows call;
  call.out = reinterpret_cast<float*>(out.data);
  call.weight = weight.data;
  call.scale = reinterpret_cast<const float*>(scale.data);
  call.width = weight.sizes[1];
  call.weight_stride = weight.strides[0];
  call.scale_stride = scale_stride_of(scale);
  call.weight_dtype = weight.dtype;
  for_rows(weight.sizes[0], call.width, active_kernels().linear->widen, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()", opweave::linear);
  m.def(
      "linear_many(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int fewest) -> ()",
      opweave::linear_many);
  m.def(
      "linear_w8a16(Tensor(a!) out, Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> ()",
      opweave::linear_w8a16);
  m.def(
      "linear_w8a16_many(Tensor(a!) out, Tensor x, Tensor weight, Tensor scale, Tensor? bias,"
      " int fewest) -> ()",
      opweave::linear_w8a16_many);
  m.def("widen_rows(Tensor(a!) out, Tensor weight, Tensor scale) -> ()", opweave::widen_rows);
}
