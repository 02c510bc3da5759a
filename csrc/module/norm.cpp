// rms_norm and fused_add_rms_norm: argument checks, then the kernels.
#include "kernels/norm.h"

#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

// out[..., h] = rms_norm(x)[..., h]; out may be x itself.
void rms_norm(const View& out, const View& x, const View* weight, double epsilon) {
  check_activation(x);
  check_rows_like(out, x);
  if (weight != nullptr) {
    check_per_column(*weight, x);
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
    check_per_column(*weight, x);
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
