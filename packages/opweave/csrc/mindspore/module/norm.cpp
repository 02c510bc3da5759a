// rms_norm for MindSpore.
#include "mindspore/module/module.h"

namespace opweave_mindspore {
namespace {

constexpr const char* kName = "rms_norm";

ms::Tensor eval(const ms::Tensor& x, const std::optional<ms::Tensor>& weight, double epsilon) {
  ms::Tensor out(x.data_type(), x.shape());
  run_native(kName, {Argument::made(out), Argument::read(x), Argument::read(weight), epsilon});
  return out;
}

pybind11::object rms_norm(const ms::Tensor& x, const std::optional<ms::Tensor>& weight,
                          double epsilon) {
  return call<1>(kName, eval, x, weight, epsilon);
}

}  // namespace
}  // namespace opweave_mindspore

OPWEAVE_MS_EXTENSION_MODULE(m) {
  using pybind11::arg;
  m.def("rms_norm", &opweave_mindspore::rms_norm, arg("x"), arg("weight"), arg("epsilon"));
}
