// The Python module around the ops.
#pragma once

#include <Python.h>

namespace opweave {

// A module with a function for every op (door B), _open(Tensor, Parameter) to open both doors, and
// the methods of `extra`, which ends with a null entry or is null. Door A is torch.ops.<space>.
// To be called once, from PyInit_<name>; null, with ImportError set, for a bad registration.
PyObject* create_python_module(const char* name, const char* space, const PyMethodDef* extra);

}  // namespace opweave
