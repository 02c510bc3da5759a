// The entry point of modules built with the kit, which defines
//   -DOPWEAVE_MODULE_NAME=<last part of the module's name>
//   -DOPWEAVE_NAMESPACE=<namespace in torch.ops>
// opweave's own module has its entry point in csrc/module.
#ifdef OPWEAVE_MODULE_NAME

#include "python_module.h"
#include "registry.h"

#define OPWEAVE_TEXT_(name) #name
#define OPWEAVE_TEXT(name) OPWEAVE_TEXT_(name)

PyMODINIT_FUNC OPWEAVE_CONCAT(PyInit_, OPWEAVE_MODULE_NAME)() {
  return opweave::create_python_module(OPWEAVE_TEXT(OPWEAVE_MODULE_NAME),
                                       OPWEAVE_TEXT(OPWEAVE_NAMESPACE), nullptr);
}

#endif
