// The torch tensor inside a Python object of type torch.Tensor.
//
// torch's promised way to it is DLPack's exchange, which takes longer than many kernels. Where in
// the object the tensor lies is torch's own business. So the call paths look for it when they open,
// and only use what they find if it is what Tensor._cdata says, for tensors of both types. The
// exchange remains for everything else.
#pragma once

#include <Python.h>

#include "torch_shim.h"

namespace opweave {

struct TensorObjectLayout {
  size_t offset = 0;            // of the tensor in the object; 0: not known
  void* dense_class = nullptr;  // the first word of a tensor that is nothing but dense memory
  bool (*is_negated)(TorchTensor) = nullptr;  // quicker than Tensor.is_neg; null: not known
};

extern TensorObjectLayout tensor_object_layout;

// Find the layout out, if the torch shim is bound. Leaves no Python error behind.
void find_tensor_object_layout(PyObject* tensor_type, PyObject* parameter_type);

// The tensor in an object of exactly one of those types. Null where the layout is not known, and
// for whatever may have no sizes, strides or memory of its own: sparse, batched or nested tensors.
inline TorchTensor dense_tensor(PyObject* object) {
  const TensorObjectLayout& layout = tensor_object_layout;
  if (layout.offset == 0) return nullptr;
  void* place = reinterpret_cast<char*>(object) + layout.offset;
  void* const* tensor = *static_cast<void* const**>(place);
  const bool is_dense = tensor != nullptr && *tensor == layout.dense_class;
  return is_dense ? static_cast<TorchTensor>(place) : nullptr;
}

// Whether memory holds the opposite of a tensor's values, as that of x.conj().imag does. `dense` is
// dense_tensor(object).
bool is_negated(PyObject* object, TorchTensor dense);

}  // namespace opweave
