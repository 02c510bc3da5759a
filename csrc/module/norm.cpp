// rms_norm and fused_add_rms_norm: argument checks, then the kernels.
#include "module/module.h"

namespace opweave {
namespace {

void check_activation(const View& x) {
  check_dtype(x, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16, OPWEAVE_FLOAT16});
  check_unit_stride(x);
}

void check_weight(const View& weight, const View& x) {
  if (weight.dtype != x.dtype) check_dtype(weight, {x.dtype, OPWEAVE_FLOAT32});
  const int64_t width = x.sizes[x.rank - 1];
  if (weight.rank != 1 || weight.sizes[0] != width) {
    throw CheckFailed("weight must be None or have shape [" + std::to_string(width) +
                      "], the last dimension of " + x.name + ", found " + describe(weight));
  }
  check_unit_stride(weight);
}

// out[..., h] = rms_norm(x)[..., h]; out may be x itself.
void rms_norm(const View& out, const View& x, const View* weight, double epsilon) {
  check_activation(x);
  check_same_sizes(out, x);
  check_same_dtype(out, x);
  check_unit_stride(out);
  check_disjoint_or_same(out, x);
  if (weight != nullptr) {
    check_weight(*weight, x);
    check_disjoint(out, *weight);
  }
  OpweaveRmsNorm call;
  call.out = out.data;
  call.x = x.data;
  call.weight = weight != nullptr ? weight->data : nullptr;
  call.rows = rows_of(out, x);
  call.width = x.sizes[x.rank - 1];
  call.epsilon = static_cast<float>(epsilon);
  call.dtype = x.dtype;
  call.weight_dtype = weight != nullptr ? weight->dtype : x.dtype;
  for_rows(call.rows.count, call.width, active_kernels().norm->rms_norm, &call);
}

// residual += x, then x = rms_norm(residual), both in place.
void fused_add_rms_norm(const View& x, const View& residual, const View* weight, double epsilon) {
  check_activation(x);
  check_same_sizes(residual, x);
  check_same_dtype(residual, x);
  check_unit_stride(residual);
  check_disjoint(x, residual);
  if (weight != nullptr) {
    check_weight(*weight, x);
    check_disjoint(x, *weight);
    check_disjoint(residual, *weight);
  }
  OpweaveFusedAddRmsNorm call;
  call.x = x.data;
  call.residual = residual.data;
  call.weight = weight != nullptr ? weight->data : nullptr;
  call.rows = rows_of(x, residual);
  call.width = x.sizes[x.rank - 1];
  call.epsilon = static_cast<float>(epsilon);
  call.dtype = x.dtype;
  call.weight_dtype = weight != nullptr ? weight->dtype : x.dtype;
  for_rows(call.rows.count, call.width, active_kernels().norm->fused_add_rms_norm, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()",
        opweave::rms_norm);
  m.def(
      "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
      opweave::fused_add_rms_norm);
}
