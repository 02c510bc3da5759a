#include "fast_call.h"

#include <stdexcept>
#include <string>

#include "dlpack.h"
#include "registry.h"
#include "slots.h"
#include "tensor_object.h"
#include "torch_tensor.h"

namespace opweave {
namespace {

// Calls with a larger tensor release the GIL. Inputs count too: even one token reads all of a
// weight.
constexpr int64_t kReleaseGilElements = int64_t{1} << 16;

const dlpack::ExchangeApi* exchange = nullptr;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;

bool raise(PyObject* type, const Op& op, const std::string& text) {
  PyErr_SetString(type, (op.schema.name + ": " + text).c_str());
  return false;
}

std::string type_name(PyObject* object) {
  std::string text = "an object";
  PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__");
  PyObject* bytes = name == nullptr ? nullptr : PyUnicode_AsUTF8String(name);
  if (bytes != nullptr) text = PyBytes_AsString(bytes);
  Py_XDECREF(bytes);
  Py_XDECREF(name);
  PyErr_Clear();
  return text;
}

const char* expected_of(Kind kind) {
  switch (kind) {
    case Kind::kTensor: return "exactly a torch.Tensor or torch.nn.Parameter";
    case Kind::kInteger: return "an int";
    case Kind::kNumber: return "a float or an int";
    case Kind::kFlag: return "a bool";
    case Kind::kIntegerList: return "a list or tuple of ints";
  }
  return "";
}

bool raise_type(const Op& op, const Argument& argument, PyObject* found) {
  return raise(PyExc_TypeError, op,
               argument.name + " must be " + expected_of(argument.type.kind) +
                   (argument.type.optional ? ", or None" : "") + ", found " + type_name(found));
}

OpweaveDtype dtype_of(const dlpack::Tensor& tensor) {
  if (tensor.type_lanes != 1) return OPWEAVE_OTHER_DTYPE;
  const int bits = tensor.type_bits;
  switch (tensor.type_code) {
    case dlpack::kFloat:
      return bits == 32   ? OPWEAVE_FLOAT32
             : bits == 16 ? OPWEAVE_FLOAT16
             : bits == 64 ? OPWEAVE_FLOAT64
                          : OPWEAVE_OTHER_DTYPE;
    case dlpack::kBfloat: return bits == 16 ? OPWEAVE_BFLOAT16 : OPWEAVE_OTHER_DTYPE;
    case dlpack::kInt:
      return bits == 64   ? OPWEAVE_INT64
             : bits == 32 ? OPWEAVE_INT32
             : bits == 16 ? OPWEAVE_INT16
             : bits == 8  ? OPWEAVE_INT8
                          : OPWEAVE_OTHER_DTYPE;
    case dlpack::kUInt: return bits == 8 ? OPWEAVE_UINT8 : OPWEAVE_OTHER_DTYPE;
    case dlpack::kBool: return OPWEAVE_BOOL;
    case dlpack::kFloat8E4m3fn: return OPWEAVE_FLOAT8_E4M3FN;
    default: return OPWEAVE_OTHER_DTYPE;
  }
}

// Tensors without plain memory (sparse, meta, batched) and devices without an implementation raise
// TypeError, and the caller falls back to the dispatcher call.
bool raise_not_plain(const Op& op, const Argument& argument) {
  PyErr_Clear();
  const bool on_cuda = op.runs_on(Device::kCuda);
  const char* memory = !on_cuda ? "CPU" : op.runs_on(Device::kCpu) ? "CPU or CUDA" : "CUDA";
  return raise(PyExc_TypeError, op,
               argument.name + " must be a plain strided tensor in " + memory +
                   " memory; use torch.ops");
}

bool read_by_exchange(PyObject* object, View* view) {
  dlpack::Tensor tensor;
  if (exchange->borrow_from_python(object, &tensor) != 0) return false;
  const bool is_cpu = tensor.device_type == dlpack::kCpu;
  if (!is_cpu && tensor.device_type != dlpack::kCuda) return false;
  view->device = is_cpu ? Device::kCpu : Device::kCuda;
  view->device_index = tensor.device_id;  // 0 for the CPU
  view->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view->sizes = tensor.sizes;
  view->strides = tensor.strides;
  view->rank = tensor.rank;
  view->dtype = dtype_of(tensor);
  return true;
}

bool read_tensor(const Op& op, const Argument& argument, PyObject* object, View* view) {
  PyTypeObject* type = Py_TYPE(object);
  if (type != tensor_type && type != parameter_type) return raise_type(op, argument, object);
  const TorchTensor dense = dense_tensor(object);
  if (is_negated(object, dense)) return raise_not_plain(op, argument);
  const bool is_read = dense != nullptr ? read_torch_tensor(dense, argument.written, view)
                                        : read_by_exchange(object, view);
  if (!is_read || !op.runs_on(view->device)) return raise_not_plain(op, argument);
  view->name = argument.name.c_str();
  if (view->lacks_memory()) return raise_not_plain(op, argument);
  return true;
}

bool is_integer(PyObject* object) { return PyLong_Check(object) && !PyBool_Check(object); }

// Python's own error does not name the op and the argument.
bool raise_too_large(const Op& op, const Argument& argument, const char* limit) {
  PyErr_Clear();
  return raise(PyExc_TypeError, op, argument.name + " must be " + limit);
}

bool read_integer(const Op& op, const Argument& argument, PyObject* object, int64_t* value) {
  if (!is_integer(object)) return raise_type(op, argument, object);
  *value = PyLong_AsLongLong(object);
  if (*value != -1 || PyErr_Occurred() == nullptr) return true;
  return raise_too_large(op, argument, "an int of 64 bits");
}

bool read_number(const Op& op, const Argument& argument, PyObject* object, double* value) {
  if (!PyFloat_Check(object) && !is_integer(object)) return raise_type(op, argument, object);
  *value = PyFloat_AsDouble(object);
  if (*value != -1.0 || PyErr_Occurred() == nullptr) return true;
  return raise_too_large(op, argument, "a float, or an int that a float can hold");
}

bool read_flag(const Op& op, const Argument& argument, PyObject* object, bool* value) {
  if (!PyBool_Check(object)) return raise_type(op, argument, object);
  *value = object == Py_True;
  return true;
}

bool read_list(const Op& op, const Argument& argument, PyObject* object, IntStorage* storage,
               IntList* value) {
  const bool is_tuple = PyTuple_Check(object);
  if (!is_tuple && !PyList_Check(object)) return raise_type(op, argument, object);
  const Py_ssize_t size = is_tuple ? PyTuple_Size(object) : PyList_Size(object);
  int64_t* integers = storage->allocate(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = is_tuple ? PyTuple_GetItem(object, i) : PyList_GetItem(object, i);
    if (item == nullptr || !read_integer(op, argument, item, &integers[i])) {
      // Only the type of an element can be wrong here; name the first one.
      if (item != nullptr && !is_integer(item)) {
        raise(PyExc_TypeError, op,
              argument.name + "[" + std::to_string(i) + "] must be an int, found " +
                  type_name(item));
      }
      return false;
    }
  }
  *value = IntList(integers, static_cast<size_t>(size));
  return true;
}

bool read_argument(const Op& op, const Argument& argument, PyObject* object, IntStorage* storage,
                   Value* value) {
  value->present = !argument.type.optional || object != Py_None;
  if (!value->present) return true;
  switch (argument.type.kind) {
    case Kind::kTensor: return read_tensor(op, argument, object, &value->view);
    case Kind::kInteger: return read_integer(op, argument, object, &value->scalar.integer);
    case Kind::kNumber: return read_number(op, argument, object, &value->scalar.number);
    case Kind::kFlag: return read_flag(op, argument, object, &value->scalar.flag);
    case Kind::kIntegerList: return read_list(op, argument, object, storage, &value->list);
  }
  return false;
}

PyObject* to_python(const Scalar& result, Kind kind) {
  switch (kind) {
    case Kind::kNumber: return PyFloat_FromDouble(result.number);
    case Kind::kFlag: return PyBool_FromLong(result.flag);
    default: return PyLong_FromLongLong(result.integer);
  }
}

// Return None, a number, or a tuple of numbers, as torch does.
PyObject* to_python(const Scalar* results, const std::vector<Kind>& returns) {
  if (returns.empty()) Py_RETURN_NONE;
  if (returns.size() == 1) return to_python(results[0], returns[0]);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(returns.size()));
  for (size_t i = 0; tuple != nullptr && i < returns.size(); ++i) {
    PyObject* item = to_python(results[i], returns[i]);
    if (item == nullptr || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), item) != 0) {
      Py_DECREF(tuple);
      return nullptr;
    }
  }
  return tuple;
}

class WithoutGil {
 public:
  explicit WithoutGil(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

bool is_large(const Op& op, const Value* values) {
  const std::vector<Argument>& arguments = op.schema.arguments;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_tensor = arguments[i].type.kind == Kind::kTensor && values[i].present;
    if (is_tensor && values[i].view.element_count() > kReleaseGilElements) return true;
  }
  return false;
}

PyObject* call_fast(const Op& op, PyObject* const* objects, Py_ssize_t count) {
  const std::vector<Argument>& arguments = op.schema.arguments;
  if (exchange == nullptr) {
    raise(PyExc_RuntimeError, op, "the direct call is not open for this torch; use torch.ops");
    return nullptr;
  }
  if (static_cast<size_t>(count) != arguments.size()) {
    raise(PyExc_TypeError, op,
          "expected " + std::to_string(arguments.size()) + " positional arguments, found " +
              std::to_string(count) + ": " + op.schema.text);
    return nullptr;
  }
  Scalar results[kMaxResults];
  try {
    Value values[kMaxArguments];
    IntStorage storage;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!read_argument(op, arguments[i], objects[i], &storage, &values[i])) return nullptr;
    }
    const WithoutGil unlocked(is_large(op, values));
    run(op, values, results);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  return to_python(results, op.schema.returns);
}

template <size_t I>
struct FastSlot {
  static PyObject* call(PyObject*, PyObject* const* objects, Py_ssize_t count) {
    return call_fast(op_table[I], objects, count);
  }
};

constexpr auto kFastSlots = make_slots<FastSlot>();

const dlpack::ExchangeApi* find_exchange(PyObject* type) {
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  // DLPack requires producers to keep the table alive for the whole process.
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  PyErr_Clear();
  while (api != nullptr && api->major != dlpack::kMajorVersion) api = api->previous;
  return api != nullptr && api->borrow_from_python != nullptr ? api : nullptr;
}

}  // namespace

bool open_fast_call(PyObject* tensor, PyObject* parameter) {
  // Kept alive for the whole process.
  Py_INCREF(tensor);
  Py_INCREF(parameter);
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor);
  parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
  exchange = find_exchange(tensor);
  return exchange != nullptr;
}

std::vector<PyMethodDef> dlpack_methods() {
  std::vector<PyMethodDef> methods;
  const std::vector<Op>& ops = all_ops();
  if (ops.size() > kMaxOps) {
    throw std::invalid_argument("more than " + std::to_string(kMaxOps) +
                                " native ops; divide them over two modules");
  }
  for (size_t i = 0; i < ops.size(); ++i) {
    const Schema& schema = ops[i].schema;
    auto* function = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(kFastSlots[i]));
    methods.push_back({schema.name.c_str(), function, METH_FASTCALL, schema.text.c_str()});
  }
  return methods;
}

}  // namespace opweave
