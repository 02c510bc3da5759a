// Direct access to the C++ tensor inside a Python object of type torch.Tensor.
//
// The stable API for this is the DLPack exchange, which takes longer than many kernels. The offset
// of the tensor in the Python object is an implementation detail of torch. So the call paths search
// for it when they open, and only use it if it agrees with Tensor._cdata for tensors of both types.
// Otherwise, and with OPWEAVE_NATIVE_TORCH_INTERNALS=0, they use the DLPack exchange.
#pragma once

#include <Python.h>

#include "torch_shim.h"

namespace opweave {

struct TensorObjectLayout {
  size_t offset = 0;            // of the tensor in the object; 0: unknown
  void* dense_class = nullptr;  // the first word (vtable) of a plain dense tensor
  bool (*is_negated)(TorchTensor) = nullptr;  // faster than Tensor.is_neg; null: unknown
};

extern TensorObjectLayout tensor_object_layout;

// Detect the layout, if the torch shim is bound. Does not leave a Python error set.
void find_tensor_object_layout(PyObject* tensor_type, PyObject* parameter_type);

// Return the tensor in an object whose type is exactly one of those. Null if the layout is unknown,
// and for tensors that may lack sizes, strides or memory: sparse, batched and nested tensors.
inline TorchTensor dense_tensor(PyObject* object) {
  const TensorObjectLayout& layout = tensor_object_layout;
  if (layout.offset == 0) return nullptr;
  void* place = reinterpret_cast<char*>(object) + layout.offset;
  void* const* tensor = *static_cast<void* const**>(place);
  const bool is_dense = tensor != nullptr && *tensor == layout.dense_class;
  return is_dense ? static_cast<TorchTensor>(place) : nullptr;
}

// Return whether the negative bit is set, as for x.conj().imag: the memory then holds the negated
// values. `dense` is dense_tensor(object).
bool is_negated(PyObject* object, TorchTensor dense);

}  // namespace opweave
