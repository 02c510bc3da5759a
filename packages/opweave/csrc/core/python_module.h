// The Python module of the ops.
#pragma once

#include <Python.h>

namespace opweave {

// Create a module with a function for every op (the fast call), _open(Tensor, Parameter), which
// opens both call paths, and the methods of `extra`, a null-terminated array or null. The
// dispatcher call is torch.ops.<space>.<op>. Call it once, from PyInit_<name>. Returns null with
// ImportError set for an invalid registration.
PyObject* create_python_module(const char* name, const char* space, const PyMethodDef* extra);

}  // namespace opweave
