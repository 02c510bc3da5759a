// The Python module opweave._C_ops: the ops, and what opweave.native needs to open their doors.
#include <Python.h>

#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dispatcher_door.h"
#include "core/dlpack_door.h"
#include "core/plain_call.h"
#include "kernels/kernels.h"

namespace {

// _open(Tensor, Parameter) -> (fast door is open, why torch.ops has no ops or None)
PyObject* open_doors(PyObject*, PyObject* args) {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &tensor, &parameter)) return nullptr;
  const bool is_fast = opweave::open_dlpack_door(tensor, parameter);
  const std::string problem = opweave::open_dispatcher_door();
  return Py_BuildValue("(Oz)", is_fast ? Py_True : Py_False,
                       problem.empty() ? nullptr : problem.c_str());
}

PyObject* text_or_none(const char* text) { return Py_BuildValue("z", text); }

// _isa() -> the instruction set in use, or None
PyObject* isa(PyObject*, PyObject*) {
  const OpweaveKernels* kernels = opweave_kernels();
  return text_or_none(kernels == nullptr ? nullptr : kernels->isa);
}

// _isa_error() -> why no instruction set is in use, or None
PyObject* isa_error(PyObject*, PyObject*) { return text_or_none(opweave_isa_error()); }

// _available_isas() -> what this CPU can run, best first
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

// _select_isa(name or None): for tests; raises ValueError for one that this CPU cannot run
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
    {"_open", open_doors, METH_VARARGS, nullptr},
    {"_isa", isa, METH_NOARGS, nullptr},
    {"_isa_error", isa_error, METH_NOARGS, nullptr},
    {"_available_isas", available_isas, METH_NOARGS, nullptr},
    {"_select_isa", select_isa, METH_VARARGS, nullptr},
    {"_open_plain_check", opweave::open_plain_check, METH_VARARGS, nullptr},
    {"_is_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(opweave::is_plain)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Python keeps pointers into this table for as long as the process lives.
std::vector<PyMethodDef>& method_table() {
  static std::vector<PyMethodDef> table = [] {
    std::vector<PyMethodDef> methods = opweave::dlpack_methods();
    methods.insert(methods.end(), std::begin(kModuleMethods), std::end(kModuleMethods));
    return methods;
  }();
  return table;
}

}  // namespace

PyMODINIT_FUNC PyInit__C_ops() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C_ops", "Native ops of opweave.", -1, nullptr, nullptr, nullptr,
      nullptr,               nullptr};
  try {
    definition.m_methods = method_table().data();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, e.what());
    return nullptr;
  }
  return PyModule_Create(&definition);
}
