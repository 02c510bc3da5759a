// The fast call: the ops as functions of the Python module, about six times cheaper than through
// torch's dispatcher. They take exactly torch.Tensor or torch.nn.Parameter, positionally, and
// bypass autograd, dispatch modes and version counters: the caller guarantees that none of them
// matters.
#pragma once

#include <Python.h>

#include <vector>

namespace opweave {

// Fetch torch's DLPack exchange table. Returns false, without a Python error, if this torch has
// none that we understand; the functions then raise.
bool open_fast_call(PyObject* tensor_type, PyObject* parameter_type);

// One method per op, for the module's method table.
std::vector<PyMethodDef> dlpack_methods();

}  // namespace opweave
