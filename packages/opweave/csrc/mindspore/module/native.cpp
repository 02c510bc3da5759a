// A native op as a PyNative operator.
#include <memory>
#include <stdexcept>

#include "mindspore/module/module.h"

namespace opweave_mindspore {
namespace {

OpweaveDtype dtype_of(ms::TypeId type) {
  switch (type) {
    case ms::TypeId::kNumberTypeFloat32: return OPWEAVE_FLOAT32;
    case ms::TypeId::kNumberTypeBFloat16: return OPWEAVE_BFLOAT16;
    case ms::TypeId::kNumberTypeFloat16: return OPWEAVE_FLOAT16;
    case ms::TypeId::kNumberTypeFloat64: return OPWEAVE_FLOAT64;
    case ms::TypeId::kNumberTypeInt8: return OPWEAVE_INT8;
    case ms::TypeId::kNumberTypeInt16: return OPWEAVE_INT16;
    case ms::TypeId::kNumberTypeInt32: return OPWEAVE_INT32;
    case ms::TypeId::kNumberTypeInt64: return OPWEAVE_INT64;
    case ms::TypeId::kNumberTypeUInt8: return OPWEAVE_UINT8;
    case ms::TypeId::kNumberTypeBool: return OPWEAVE_BOOL;
    default: return OPWEAVE_OTHER_DTYPE;
  }
}

class NativeOp : public ms::pynative::PyboostRunner {
 public:
  NativeOp(const std::string& name, std::vector<Argument> arguments)
      : PyboostRunner(name), arguments_(std::move(arguments)), strides_(arguments_.size()) {}

  void LaunchKernel() override {
    std::vector<OpweaveArgument> passed(arguments_.size());
    for (size_t i = 0; i < passed.size(); ++i) passed[i] = pass(i);
    const char* problem = opweave_run_op(op_name().c_str(), passed.data(), passed.size());
    if (problem != nullptr) throw std::runtime_error(problem);
  }

 protected:
  // Launch on the device thread, which calls this. PyboostRunner would use the launch thread, but
  // MindSpore's own CPU operators run on the device thread without waiting for it: with MindSpore
  // 2.10.0, the next operator would read outputs before they are written.
  void _DispatchLaunchTask() override { LaunchKernel(); }

 private:
  OpweaveArgument pass(size_t i) {
    const Argument& argument = arguments_[i];
    OpweaveArgument passed = {};
    passed.integer = argument.integer();
    passed.number = argument.number();
    if (!argument.tensor().has_value()) return passed;
    const ms::Tensor& tensor = *argument.tensor();
    strides_[i] = tensor.stride();
    passed.tensor.present = 1;
    passed.tensor.dtype = dtype_of(tensor.data_type());
    passed.tensor.rank = static_cast<int32_t>(tensor.shape().size());
    passed.tensor.sizes = tensor.shape().data();
    passed.tensor.strides = strides_[i].data();
    // GetDataPtr() is not valid for an empty tensor.
    passed.tensor.data = tensor.numel() > 0 ? tensor.GetDataPtr() : nullptr;
    return passed;
  }

  std::vector<Argument> arguments_;
  std::vector<std::vector<int64_t>> strides_;
};

}  // namespace

void run_native(const std::string& name, std::vector<Argument> arguments) {
  std::vector<ms::Tensor> inputs;
  std::vector<ms::Tensor> outputs;
  for (const Argument& argument : arguments) {
    if (argument.is_input()) inputs.push_back(*argument.tensor());
    if (argument.is_output()) outputs.push_back(*argument.tensor());
  }
  std::make_shared<NativeOp>(name, std::move(arguments))->Run(inputs, outputs);
}

}  // namespace opweave_mindspore
