#include "mindspore/native_op.h"

#include <stdexcept>
#include <string>

#include "core/registry.h"

namespace opweave {
namespace {

const Op& find(const std::string& name) {
  for (const Op& op : all_ops()) {
    if (op.schema.name == name) return op;
  }
  throw std::runtime_error("there is no native op '" + name + "'");
}

View view_of(const OpweaveTensor& tensor, const std::string& name) {
  View view;
  view.name = name.c_str();
  view.data = static_cast<char*>(tensor.data);
  view.sizes = tensor.sizes;
  view.strides = tensor.strides;
  view.rank = tensor.rank;
  view.dtype = tensor.dtype;
  view.device = Device::kCpu;
  view.device_index = 0;
  return view;
}

void fill(Value* value, const OpweaveArgument& found, const Argument& declared) {
  value->present = true;
  switch (declared.type.kind) {
    case Kind::kTensor:
      value->present = found.tensor.present != 0;
      value->view = view_of(found.tensor, declared.name);
      return;
    case Kind::kInteger: value->scalar.integer = found.integer; return;
    case Kind::kNumber: value->scalar.number = found.number; return;
    case Kind::kFlag: value->scalar.flag = found.integer != 0; return;
    default:
      throw std::runtime_error(declared.name + " is " + type_name(declared.type) +
                               ", which MindSpore operators do not pass on");
  }
}

void run_by_name(const char* name, const OpweaveArgument* arguments, size_t count) {
  const Op& op = find(name);
  if (!op.schema.returns.empty()) {
    throw std::runtime_error(op.schema.name + " returns " + returns_name(op.schema.returns) +
                             ", which MindSpore operators do not pass on");
  }
  const std::vector<Argument>& declared = op.schema.arguments;
  if (count != declared.size()) {
    throw std::runtime_error(op.schema.name + " takes " + std::to_string(declared.size()) +
                             " arguments, found " + std::to_string(count));
  }
  Value values[kMaxArguments];
  for (size_t i = 0; i < count; ++i) fill(&values[i], arguments[i], declared[i]);
  Scalar results[kMaxResults];
  run(op, values, results);
}

}  // namespace
}  // namespace opweave

extern "C" const char* opweave_run_op(const char* name, const OpweaveArgument* arguments,
                                      size_t count) {
  thread_local std::string problem;
  try {
    opweave::run_by_name(name, arguments, count);
    return nullptr;
  } catch (const std::exception& e) {
    problem = e.what();
    return problem.c_str();
  }
}
