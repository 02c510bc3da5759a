// The fast call path: the ops as functions of the Python module, about six times cheaper than
// torch's dispatcher. They accept exactly torch.Tensor or torch.nn.Parameter, as positional
// arguments, and bypass autograd, dispatch modes and version counters. The caller must make sure
// that none of these is needed.
#pragma once

#include <Python.h>

#include <vector>

namespace opweave {

// Fetch torch's DLPack exchange table. Returns false, without a Python error, if this torch does
// not have one with a supported version; the functions then raise.
bool open_fast_call(PyObject* tensor_type, PyObject* parameter_type);

// Return one method per op, for the module's method table.
std::vector<PyMethodDef> dlpack_methods();

}  // namespace opweave
