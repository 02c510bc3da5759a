// rms_norm and fused_add_rms_norm: argument checks, then the kernels.
#include "kernels/norm.h"

#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

// out = rms_norm(x), over the last dimension; out may be x.
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

// sum = x + residual; out = rms_norm(sum).
void run_add_rms_norm(const View& out, const View& sum, const View& x, const View& residual,
                      const View* weight, double epsilon) {
  check_activation(x);
  for (const View* other : {&residual, &out, &sum}) {
    check_same_sizes(*other, x);
    check_same_dtype(*other, x);
    check_unit_stride(*other);
  }
  check_disjoint(out, sum);
  if (weight != nullptr) {
    check_per_column(*weight, x);
    check_disjoint(out, *weight);
    check_disjoint(sum, *weight);
  }
  OpweaveAddRmsNorm call;
  call.out = out.data;
  call.sum = sum.data;
  call.x = x.data;
  call.residual = residual.data;
  call.weight = weight != nullptr ? weight->data : nullptr;
  call.rows = rows_of(out, x);
  call.sum_rows = rows_of(sum, residual);
  call.width = x.sizes[x.rank - 1];
  call.epsilon = static_cast<float>(epsilon);
  call.dtype = x.dtype;
  call.weight_dtype = weight != nullptr ? weight->dtype : x.dtype;
  for_rows(call.rows.count, call.width, active_kernels().norm->add_rms_norm, &call);
}

// residual += x; x = rms_norm(residual), both in-place.
void fused_add_rms_norm(const View& x, const View& residual, const View* weight, double epsilon) {
  run_add_rms_norm(x, residual, x, residual, weight, epsilon);
}

// Out-of-place fused_add_rms_norm.
void add_rms_norm(const View& out, const View& sum, const View& x, const View& residual,
                  const View* weight, double epsilon) {
  for (const View* input : {&x, &residual}) {
    check_disjoint(out, *input);
    check_disjoint(sum, *input);
  }
  run_add_rms_norm(out, sum, x, residual, weight, epsilon);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()",
        opweave::rms_norm);
  m.def(
      "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
      opweave::fused_add_rms_norm);
  m.def(
      "add_rms_norm(Tensor(a!) out, Tensor(b!) sum, Tensor x, Tensor residual, Tensor? weight, "
      "float epsilon) -> ()",
      opweave::add_rms_norm);
}
