#include "tensor_object.h"

#include "symbols.h"

namespace opweave {

TensorObjectLayout tensor_object_layout;

namespace {

class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// Return an integer attribute, or 0 if it does not exist.
size_t number(PyObject* object, const char* name) {
  const Owned value(PyObject_GetAttrString(object, name));
  return value.get() == nullptr ? 0 : PyLong_AsSize_t(value.get());
}

// Return the only offset in the object that contains the address `wanted`, or 0 if it is missing or
// ambiguous.
size_t find_word(PyObject* object, size_t object_size, size_t wanted) {
  size_t found = 0;
  for (size_t at = sizeof(PyObject); at + sizeof(void*) <= object_size; at += sizeof(void*)) {
    if (*reinterpret_cast<size_t*>(reinterpret_cast<char*>(object) + at) != wanted) continue;
    if (found != 0) return 0;
    found = at;
  }
  return found;
}

// Return the layout of one object; unknown if its type is not exactly `type`.
TensorObjectLayout layout_of(PyObject* object, PyObject* type) {
  TensorObjectLayout layout;
  if (object == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type) return layout;
  const size_t tensor = number(object, "_cdata");
  if (tensor == 0 || PyErr_Occurred() != nullptr) return layout;
  layout.offset = find_word(object, number(type, "__basicsize__"), tensor);
  layout.dense_class = *reinterpret_cast<void**>(tensor);
  return layout;
}

// Return the layout on which an empty tensor and an empty parameter agree, and from which a sparse
// tensor differs only in its class.
TensorObjectLayout find_layout(PyObject* tensor_type, PyObject* parameter_type) {
  const Owned tensor(PyObject_CallNoArgs(tensor_type));
  const Owned parameter(PyObject_CallNoArgs(parameter_type));
  if (tensor.get() == nullptr) return {};
  const Owned sparse(PyObject_CallMethod(tensor.get(), "to_sparse", nullptr));
  const TensorObjectLayout first = layout_of(tensor.get(), tensor_type);
  const TensorObjectLayout second = layout_of(parameter.get(), parameter_type);
  const TensorObjectLayout third = layout_of(sparse.get(), tensor_type);
  const bool agree = first.offset == second.offset && first.offset == third.offset &&
                     first.dense_class == second.dense_class;
  return agree && first.dense_class != third.dense_class ? first : TensorObjectLayout{};
}

bool asks_python(PyObject* object) {
  const Owned answer(PyObject_CallMethod(object, "is_neg", nullptr));
  PyErr_Clear();
  return answer.get() != Py_False;
}

// Leave it null if torch lacks the function, or if it returns a wrong result for a test tensor.
void find_is_negated(PyObject* tensor_type, TensorObjectLayout* layout) {
  // bool at::native::is_neg(const at::Tensor&)
  bool (*found)(TorchTensor) = nullptr;
  if (!bind_symbol(kTorchLibrary, "_ZN2at6native6is_negERKNS_6TensorE", &found)) return;
  const Owned torch(PyImport_ImportModule("torch"));
  const Owned tensor(PyObject_CallNoArgs(tensor_type));
  if (torch.get() == nullptr || tensor.get() == nullptr) return;
  const Owned opposite(PyObject_CallMethod(torch.get(), "_neg_view", "O", tensor.get()));
  if (opposite.get() == nullptr) return;
  const TorchTensor plain = dense_tensor(tensor.get());
  const TorchTensor negated = dense_tensor(opposite.get());
  if (plain == nullptr || negated == nullptr || found(plain) || !found(negated)) return;
  layout->is_negated = found;
}

}  // namespace

void find_tensor_object_layout(PyObject* tensor_type, PyObject* parameter_type) {
  tensor_object_layout = {};
  if (torch_shim().get_dim == nullptr || !may_use_torch_internals()) return;
  tensor_object_layout = find_layout(tensor_type, parameter_type);
  find_is_negated(tensor_type, &tensor_object_layout);
  PyErr_Clear();
}

bool is_negated(PyObject* object, TorchTensor dense) {
  const auto is_negated = tensor_object_layout.is_negated;
  return dense != nullptr && is_negated != nullptr ? is_negated(dense) : asks_python(object);
}

}  // namespace opweave
