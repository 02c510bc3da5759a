// rms_norm_gated: argument checks, then the kernel.
#include "kernels/gated_norm.h"

#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

// An exponential costs about as much as this many elements of a norm.
constexpr int64_t kWork = 4;

void check_group_size(int64_t group_size, const View& x) {
  const int64_t width = x.sizes[x.rank - 1];
  if (group_size > 0 && width % group_size == 0) return;
  throw CheckFailed("group_size must divide " + std::to_string(width) +
                    ", the last dimension of x, found " + std::to_string(group_size));
}

// out may be x or the gate.
void rms_norm_gated(const View& out, const View& x, const View* weight, const View* gate,
                    double epsilon, int64_t group_size, bool norm_before_gate, bool sigmoid) {
  check_activation(x);
  check_rows_like(out, x);
  check_group_size(group_size, x);
  if (weight != nullptr) {
    check_per_column(*weight, x);
    check_disjoint(out, *weight);
  }
  if (gate != nullptr) {
    check_same_sizes(*gate, x);
    check_same_dtype(*gate, x);
    check_unit_stride(*gate);
    check_disjoint_or_same(out, *gate);
  }
  OpweaveGatedNorm call;
  call.out = out.data;
  call.x = x.data;
  call.gate = gate != nullptr ? gate->data : nullptr;
  call.weight = weight != nullptr ? weight->data : nullptr;
  call.rows = rows_of(out, x);
  call.gate_rows = gate != nullptr ? rows_of(*gate, *gate) : rows_of(x, x);
  call.width = x.sizes[x.rank - 1];
  call.group_size = group_size;
  call.epsilon = static_cast<float>(epsilon);
  call.norm_before_gate = norm_before_gate;
  call.is_sigmoid = sigmoid;
  call.dtype = x.dtype;
  call.weight_dtype = weight != nullptr ? weight->dtype : x.dtype;
  const auto kernel = active_kernels().gated_norm->rms_norm_gated;
  for_rows(call.rows.count, kWork * call.width, kernel, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "rms_norm_gated(Tensor(a!) out, Tensor x, Tensor? weight, Tensor? gate, float epsilon, "
      "int group_size, bool norm_before_gate, bool sigmoid) -> ()",
      opweave::rms_norm_gated);
}
