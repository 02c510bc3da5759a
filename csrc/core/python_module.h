// The Python module around the ops.
#pragma once

#include <Python.h>

namespace opweave {

// A module with a function for every op (the fast call), _open(Tensor, Parameter) to open both call
// paths, and the methods of `extra`, which ends with a null entry or is null. The dispatcher call
// is torch.ops.<space>.<op>.
// To be called once, from PyInit_<name>; null, with ImportError set, for a bad registration.
PyObject* create_python_module(const char* name, const char* space, const PyMethodDef* extra);

}  // namespace opweave
