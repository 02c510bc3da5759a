#include "python_module.h"

#include <string>
#include <vector>

#include "dispatcher_call.h"
#include "fast_call.h"
#include "tensor_object.h"
#include "utf8.h"

namespace opweave {
namespace {

const char* torch_namespace = nullptr;

// _open(Tensor, Parameter) -> (fast call is available, why torch.ops is not available or None)
PyObject* open_call_paths(PyObject*, PyObject* args) {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &tensor, &parameter)) return nullptr;
  const bool is_fast = open_fast_call(tensor, parameter);
  const std::string problem = open_dispatcher_call(torch_namespace);
  find_tensor_object_layout(tensor, parameter);
  return Py_BuildValue("(Oz)", is_fast ? Py_True : Py_False,
                       problem.empty() ? nullptr : problem.c_str());
}

// _namespace() -> the namespace of the ops in torch.ops
PyObject* find_namespace(PyObject*, PyObject*) { return PyUnicode_FromString(torch_namespace); }

// _reads_tensors_directly() -> whether the self-test of the layout of Python tensors passed
PyObject* reads_tensors_directly(PyObject*, PyObject*) {
  return PyBool_FromLong(tensor_object_layout.offset != 0);
}

std::vector<PyMethodDef> collect_methods(const PyMethodDef* extra) {
  std::vector<PyMethodDef> methods = dlpack_methods();
  methods.push_back({"_open", open_call_paths, METH_VARARGS, nullptr});
  methods.push_back({"_namespace", find_namespace, METH_NOARGS, nullptr});
  methods.push_back({"_reads_tensors_directly", reads_tensors_directly, METH_NOARGS, nullptr});
  for (; extra != nullptr && extra->ml_name != nullptr; ++extra) methods.push_back(*extra);
  methods.push_back({nullptr, nullptr, 0, nullptr});
  return methods;
}

}  // namespace

PyObject* create_python_module(const char* name, const char* space, const PyMethodDef* extra) {
  // Static, because Python keeps pointers to both.
  static std::vector<PyMethodDef> methods;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, nullptr, nullptr, -1, nullptr, nullptr,
                                   nullptr, nullptr, nullptr};
  try {
    methods = collect_methods(extra);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, valid_utf8(e.what()).c_str());
    return nullptr;
  } catch (...) {
    PyErr_SetString(PyExc_ImportError,
                    "an OPWEAVE_EXTENSION_MODULE threw something other than a std::exception");
    return nullptr;
  }
  torch_namespace = space;
  definition.m_name = name;
  definition.m_methods = methods.data();
  return PyModule_Create(&definition);
}

}  // namespace opweave
