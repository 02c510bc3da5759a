// Whether torch's dispatcher has nothing to add to a call, answered in one call from Python: every
// argument is exactly a torch.Tensor, a torch.nn.Parameter or None, no mode, transform or tracer is
// active in this thread, and grad mode is off.
//
// torch offers these facts to Python one by one only; asking for each costs more than many kernels.
// The three functions asked here are C++ symbols of torch without a promise to stay. So they are
// looked up by name, Python tries the answers out before it trusts them (opweave.native.guard), and
// asks torch itself where that fails.
#pragma once

#include <Python.h>

namespace opweave {

// _open_plain_check(Tensor, Parameter, dispatch keys) -> whether the symbols were found
PyObject* open_plain_check(PyObject*, PyObject* args);

// _is_plain(*arguments) -> bool; METH_FASTCALL. The first argument may not be None.
PyObject* is_plain(PyObject*, PyObject* const* objects, Py_ssize_t count);

}  // namespace opweave
