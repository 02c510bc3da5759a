#include "plain_call.h"

#include <cstdint>
#include <vector>

#include "symbols.h"
#include "tensor_object.h"
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

// Return whether the rows of a tensor can be read as they lie in the memory of the CPU. False, too,
// if that takes longer to find out.
bool has_plain_rows(PyObject* object) {
  const TorchTensor tensor = dense_tensor(object);
  if (tensor == nullptr || tensor_object_layout.is_negated == nullptr) return false;
  const TorchShim& torch = torch_shim();
  int32_t device = 0;
  int64_t dim = 0;
  int64_t* strides = nullptr;
  if (torch.get_device_type(tensor, &device) != 0 || torch.get_dim(tensor, &dim) != 0 ||
      torch.get_strides(tensor, &strides) != 0) {
    return false;
  }
  const bool has_rows = dim == 0 || strides[dim - 1] == 1;
  return device == torch.cpu && has_rows && !tensor_object_layout.is_negated(tensor);
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
  bool have_plain_rows = true;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_plain_object(objects[i], /*may_be_none=*/i > 0)) return PyLong_FromLong(0);
    have_plain_rows = have_plain_rows && (objects[i] == Py_None || has_plain_rows(objects[i]));
  }
  return PyLong_FromLong(!is_plain_thread() ? 0 : have_plain_rows ? 2 : 1);
}

}  // namespace opweave
