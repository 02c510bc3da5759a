// Activations: argument checks, then the kernels.
#include "kernels/activation.h"

#include <cmath>

#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

using Kernel = OpweaveRangeKernel OpweaveActivationKernels::*;

// An exponential costs about as much as this many elements of a norm.
constexpr int64_t kWork = 4;

void run(const View& out, const View& x, Kernel kernel, OpweaveActivation& call) {
  call.out = out.data;
  call.x = x.data;
  call.rows = rows_of(out, x);
  call.width = out.sizes[out.rank - 1];
  call.dtype = x.dtype;
  const OpweaveRangeKernel range = active_kernels().activation->*kernel;
  for_rows(call.rows.count, kWork * call.width, range, &call);
}

// Run a kernel that computes out (..., d) from x (..., 2 * d).
void run_gated(const View& out, const View& x, Kernel kernel, double first = 0, double second = 0) {
  check_activation(x);
  check_half_of(out, x);
  check_same_dtype(out, x);
  check_unit_stride(out);
  check_disjoint(out, x);
  OpweaveActivation call;
  call.parameters[0] = static_cast<float>(first);
  call.parameters[1] = static_cast<float>(second);
  run(out, x, kernel, call);
}

// Run a kernel whose out has the shape of x; out may be x.
void run_elementwise(const View& out, const View& x, Kernel kernel) {
  check_activation(x);
  check_rows_like(out, x);
  OpweaveActivation call;
  run(out, x, kernel, call);
}

void silu_and_mul(const View& out, const View& x) {
  run_gated(out, x, &OpweaveActivationKernels::silu_and_mul);
}

void mul_and_silu(const View& out, const View& x) {
  run_gated(out, x, &OpweaveActivationKernels::mul_and_silu);
}

void gelu_and_mul(const View& out, const View& x, bool tanh) {
  run_gated(out, x,
            tanh ? &OpweaveActivationKernels::gelu_tanh_and_mul
                 : &OpweaveActivationKernels::gelu_and_mul);
}

void gelu_and_mul_sparse(const View& out, const View& x, double std_multiplier, bool tanh) {
  run_gated(out, x,
            tanh ? &OpweaveActivationKernels::gelu_tanh_and_mul_sparse
                 : &OpweaveActivationKernels::gelu_and_mul_sparse,
            std_multiplier);
}

void fatrelu_and_mul(const View& out, const View& x, double threshold) {
  run_gated(out, x, &OpweaveActivationKernels::fatrelu_and_mul, threshold);
}

void swigluoai_and_mul(const View& out, const View& x, double alpha, double limit) {
  const double factor = std::isnan(limit) ? limit : alpha;  // clamping to NaN gives NaN
  run_gated(out, x, &OpweaveActivationKernels::swigluoai_and_mul, factor, limit);
}

void gelu_new(const View& out, const View& x) {
  run_elementwise(out, x, &OpweaveActivationKernels::gelu_new);
}

void gelu_fast(const View& out, const View& x) {
  run_elementwise(out, x, &OpweaveActivationKernels::gelu_fast);
}

void quick_gelu(const View& out, const View& x) {
  run_elementwise(out, x, &OpweaveActivationKernels::quick_gelu);
}

void relu2(const View& out, const View& x) {
  run_elementwise(out, x, &OpweaveActivationKernels::relu2);
}

void check_number(const View& number, const View& out, const View& x) {
  check_same_dtype(number, x);
  if (number.element_count() != 1) {
    throw CheckFailed(std::string(number.name) + " must have one element, found " +
                      describe(number));
  }
  check_disjoint(out, number);
}

void xielu(const View& out, const View& x, const View& alpha_p, const View& alpha_n, double beta,
           double eps) {
  check_activation(x);
  check_rows_like(out, x);
  check_number(alpha_p, out, x);
  check_number(alpha_n, out, x);
  OpweaveActivation call;
  call.alpha_p = alpha_p.data;
  call.alpha_n = alpha_n.data;
  call.parameters[0] = static_cast<float>(beta);
  call.parameters[1] = static_cast<float>(eps);
  run(out, x, &OpweaveActivationKernels::xielu, call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", opweave::silu_and_mul);
  m.def("mul_and_silu(Tensor(a!) out, Tensor x) -> ()", opweave::mul_and_silu);
  m.def("gelu_and_mul(Tensor(a!) out, Tensor x, bool tanh) -> ()", opweave::gelu_and_mul);
  m.def("gelu_and_mul_sparse(Tensor(a!) out, Tensor x, float std_multiplier, bool tanh) -> ()",
        opweave::gelu_and_mul_sparse);
  m.def("fatrelu_and_mul(Tensor(a!) out, Tensor x, float threshold) -> ()",
        opweave::fatrelu_and_mul);
  m.def("swigluoai_and_mul(Tensor(a!) out, Tensor x, float alpha, float limit) -> ()",
        opweave::swigluoai_and_mul);
  m.def("gelu_new(Tensor(a!) out, Tensor x) -> ()", opweave::gelu_new);
  m.def("gelu_fast(Tensor(a!) out, Tensor x) -> ()", opweave::gelu_fast);
  m.def("quick_gelu(Tensor(a!) out, Tensor x) -> ()", opweave::quick_gelu);
  m.def("relu2(Tensor(a!) out, Tensor x) -> ()", opweave::relu2);
  m.def(
      "xielu(Tensor(a!) out, Tensor x, Tensor alpha_p, Tensor alpha_n, float beta, float eps) -> "
      "()",
      opweave::xielu);
}
