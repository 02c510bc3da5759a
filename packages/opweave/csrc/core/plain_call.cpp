#include "plain_call.h"

#include <cstdint>
#include <vector>

#include "symbols.h"
#include "torch_shim.h"

namespace opweave {
namespace {

#if defined(__APPLE__)
constexpr const char* kCoreLibrary = "libc10.dylib";
#else
constexpr const char* kCoreLibrary = "libc10.so";
#endif

// bool c10::GradMode::is_enabled(). The initial value rejects all calls until it is bound.
bool (*grad_mode_enabled)() = [] { return true; };
// bool at::impl::torch_function_mode_enabled()
bool (*function_mode_enabled)() = nullptr;
// bool c10::impl::tls_is_dispatch_key_included(c10::DispatchKey), an enum of uint16_t
bool (*key_included)(uint16_t key) = nullptr;

std::vector<uint16_t> watched_keys;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;

bool is_plain_object(PyObject* object, bool may_be_none) {
  PyTypeObject* type = Py_TYPE(object);
  return type == tensor_type || type == parameter_type || (may_be_none && object == Py_None);
}

bool is_plain_thread() {
  if (grad_mode_enabled() || function_mode_enabled()) return false;
  for (const uint16_t key : watched_keys) {
    if (key_included(key)) return false;
  }
  return true;
}

}  // namespace

PyObject* open_plain_check(PyObject*, PyObject* args) {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  PyObject* keys = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &tensor, &parameter, &keys)) return nullptr;
  std::vector<uint16_t> codes;
  const Py_ssize_t count = PySequence_Size(keys);
  if (count < 0) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(keys, i);
    const long code = item == nullptr ? -1 : PyLong_AsLong(item);
    Py_XDECREF(item);
    if (PyErr_Occurred() != nullptr) return nullptr;
    codes.push_back(static_cast<uint16_t>(code));
  }
  const bool found =
      may_use_torch_internals() &&
      bind_symbol(kCoreLibrary, "_ZN3c108GradMode10is_enabledEv", &grad_mode_enabled) &&
      bind_symbol(kTorchLibrary, "_ZN2at4impl27torch_function_mode_enabledEv",
                  &function_mode_enabled) &&
      bind_symbol(kCoreLibrary, "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
                  &key_included);
  // Kept alive for the whole process.
  Py_INCREF(tensor);
  Py_INCREF(parameter);
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor);
  parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
  watched_keys = codes;
  return PyBool_FromLong(found);
}

PyObject* is_plain(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_plain_object(objects[i], /*may_be_none=*/i > 0)) Py_RETURN_FALSE;
  }
  return PyBool_FromLong(is_plain_thread());
}

}  // namespace opweave
