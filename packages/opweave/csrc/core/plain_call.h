// Decide in one call from Python whether a call can bypass torch's dispatcher: every argument is
// exactly a torch.Tensor, a torch.nn.Parameter or None, no mode, transform or tracer is active in
// this thread, and grad mode is off.
//
// torch's Python API needs one call for each of these facts, which together cost more than many
// kernels. The three functions used here are C++ symbols of torch without a stability guarantee. So
// they are looked up by name, opweave.native.loader verifies their answers before use, and falls
// back to torch's Python API otherwise, as with OPWEAVE_NATIVE_TORCH_INTERNALS=0.
#pragma once

#include <Python.h>

namespace opweave {

// _open_plain_check(Tensor, Parameter, dispatch keys) -> bool: the symbols were found
PyObject* open_plain_check(PyObject*, PyObject* args);

// _is_plain(*arguments) -> int; METH_FASTCALL. The first argument must not be None. 0: no; 1: yes;
// 2: yes, and every tensor is on the CPU, not lazily negated, and its last stride is 1. These are
// the facts about tensors that most kernels require.
PyObject* is_plain(PyObject*, PyObject* const* objects, Py_ssize_t count);

}  // namespace opweave
