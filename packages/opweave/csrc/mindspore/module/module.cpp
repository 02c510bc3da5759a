// The Python module _C_ops with everything that the integration files register.
#include "mindspore/module/module.h"

namespace opweave_mindspore {
namespace {

std::vector<void (*)(pybind11::module_&)>& definitions() {
  static std::vector<void (*)(pybind11::module_&)> list;
  return list;
}

}  // namespace

Registration::Registration(void (*define)(pybind11::module_&)) {
  definitions().push_back(define);
}

}  // namespace opweave_mindspore

// The builder defines the module's name.
PYBIND11_MODULE(MS_EXTENSION_NAME, m) {
  for (auto* define : opweave_mindspore::definitions()) define(m);
}
