// The header of the integration files: registration in the Python module, and calls of native ops
// as operators in MindSpore's PyNative mode.
//
//   OPWEAVE_MS_EXTENSION_MODULE(m) { m.def("scale", &scale, pybind11::arg("x")); }
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mindspore/native_op.h"
#include "ms_extension/api.h"

namespace opweave_mindspore {

// One argument of a native op, in the order of its schema. For a tensor, it includes whether the op
// reads or writes it.
class Argument {
 public:
  Argument(int64_t integer) : integer_(integer) {}  // NOLINT: a number is an argument
  Argument(double number) : number_(number) {}      // NOLINT

  static Argument read(std::optional<ms::Tensor> x) { return {std::move(x), true, false}; }
  static Argument updated(ms::Tensor x) { return {std::move(x), true, true}; }
  static Argument made(ms::Tensor x) { return {std::move(x), false, true}; }

  bool is_input() const { return is_input_; }
  bool is_output() const { return is_output_; }
  const std::optional<ms::Tensor>& tensor() const { return tensor_; }
  int64_t integer() const { return integer_; }
  double number() const { return number_; }

 private:
  Argument(std::optional<ms::Tensor> tensor, bool is_input, bool is_output)
      : tensor_(std::move(tensor)),
        is_input_(is_input && tensor_.has_value()),
        is_output_(is_output) {}

  std::optional<ms::Tensor> tensor_;
  bool is_input_ = false;
  bool is_output_ = false;
  int64_t integer_ = 0;
  double number_ = 0;
};

// Queue a native op in MindSpore, which launches it when its inputs are ready. Errors of the op are
// raised at MindSpore's next synchronization; the op has then not written anything.
void run_native(const std::string& name, std::vector<Argument> arguments);

// Native ops support strides, so tensors need not be copied (and outputs must not be).
inline void keep_strides(const ms::Tensor& tensor) { tensor.SetNeedContiguous(false); }
inline void keep_strides(const std::optional<ms::Tensor>& tensor) {
  if (tensor.has_value()) keep_strides(*tensor);
}
template <class Number>
void keep_strides(const Number&) {}

// Queue eval(arguments...), which returns the Made outputs of the operator.
template <int Made, class Eval, class... Arguments>
pybind11::object call(const std::string& name, Eval eval, const Arguments&... arguments) {
  (keep_strides(arguments), ...);
  return ms::pynative::PyboostRunner::Call<Made>(name, eval, arguments...);
}

struct Registration {
  explicit Registration(void (*define)(pybind11::module_&));
};

}  // namespace opweave_mindspore

#define OPWEAVE_MS_CONCAT_(a, b) a##b
#define OPWEAVE_MS_CONCAT(a, b) OPWEAVE_MS_CONCAT_(a, b)
#define OPWEAVE_MS_EXTENSION_MODULE(m)                                                  \
  static void OPWEAVE_MS_CONCAT(opweave_define_, __LINE__)(pybind11::module_&);          \
  static const ::opweave_mindspore::Registration OPWEAVE_MS_CONCAT(opweave_registration_, \
                                                                   __LINE__)(            \
      OPWEAVE_MS_CONCAT(opweave_define_, __LINE__));                                     \
  static void OPWEAVE_MS_CONCAT(opweave_define_, __LINE__)(pybind11::module_ & m)
