// layer_norm: argument checks, then the kernel.
#include "kernels/layer_norm.h"

#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

// out may be x.
void layer_norm(const View& out, const View& x, const View* weight, const View* bias,
                double epsilon) {
  check_activation(x);
  check_rows_like(out, x);
  for (const View* vector : {weight, bias}) {
    if (vector == nullptr) continue;
    check_per_column(*vector, x);
    check_disjoint(out, *vector);
  }
  if (weight != nullptr && bias != nullptr) check_same_dtype(*bias, *weight);
  const View* vector = weight != nullptr ? weight : bias;
  OpweaveLayerNorm call;
  call.out = out.data;
  call.x = x.data;
  call.weight = weight != nullptr ? weight->data : nullptr;
  call.bias = bias != nullptr ? bias->data : nullptr;
  call.rows = rows_of(out, x);
  call.width = x.sizes[x.rank - 1];
  call.epsilon = static_cast<float>(epsilon);
  call.dtype = x.dtype;
  call.weight_dtype = vector != nullptr ? vector->dtype : x.dtype;
  for_rows(call.rows.count, call.width, active_kernels().layer_norm->layer_norm, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("layer_norm(Tensor(a!) out, Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> ()",
        opweave::layer_norm);
}
