// The Python module opweave._C_ops: the ops, and the functions for opweave.native.
#include <Python.h>

#include "core/plain_call.h"
#include "core/python_module.h"
#include "core/utf8.h"
#include "kernels/kernels.h"

namespace {

PyObject* text_or_none(const char* text) { return Py_BuildValue("z", text); }

// _isa() -> the instruction set in use, or None
PyObject* isa(PyObject*, PyObject*) {
  const OpweaveKernels* kernels = opweave_kernels();
  return text_or_none(kernels == nullptr ? nullptr : kernels->isa);
}

// _isa_error() -> why no instruction set could be selected, or None
PyObject* isa_error(PyObject*, PyObject*) {
  const char* error = opweave_isa_error();
  // The message quotes OPWEAVE_ISA, which may contain any bytes.
  return text_or_none(error == nullptr ? nullptr : opweave::valid_utf8(error).c_str());
}

// _available_isas() -> the instruction sets that this CPU supports, best first
PyObject* available_isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (names == nullptr) return nullptr;
  for (size_t i = 0; const char* name = opweave_available_isa(i); ++i) {
    PyObject* item = PyUnicode_FromString(name);
    const bool failed = item == nullptr || PyList_Append(names, item) != 0;
    Py_XDECREF(item);
    if (failed) {
      Py_DECREF(names);
      return nullptr;
    }
  }
  PyObject* result = PyList_AsTuple(names);
  Py_DECREF(names);
  return result;
}

// _select_isa(name or None), for tests. Raises ValueError for an unsupported instruction set.
PyObject* select_isa(PyObject*, PyObject* args) {
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "z", &name)) return nullptr;
  if (const char* problem = opweave_select_isa(name)) {
    PyErr_SetString(PyExc_ValueError, problem);
    return nullptr;
  }
  Py_RETURN_NONE;
}

const PyMethodDef kModuleMethods[] = {
    {"_isa", isa, METH_NOARGS, nullptr},
    {"_isa_error", isa_error, METH_NOARGS, nullptr},
    {"_available_isas", available_isas, METH_NOARGS, nullptr},
    {"_select_isa", select_isa, METH_VARARGS, nullptr},
    {"_open_plain_check", opweave::open_plain_check, METH_VARARGS, nullptr},
    {"_is_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(opweave::is_plain)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMODINIT_FUNC PyInit__C_ops() {
  return opweave::create_python_module("_C_ops", "opweave_c", kModuleMethods);
}
