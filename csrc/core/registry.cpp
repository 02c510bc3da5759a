#include "core/registry.h"

#include <stdexcept>

#include "core/check.h"

namespace opweave {
namespace {

std::vector<void (*)(Module&)>& definitions() {
  static std::vector<void (*)(Module&)> list;
  return list;
}

std::vector<Op>& ops() {
  static std::vector<Op> list;
  return list;
}

void check_parameters(const Schema& schema, const std::vector<Kind>& parameters) {
  const size_t expected = schema.arguments.size();
  if (expected > kMaxArguments) {
    throw std::invalid_argument("schema '" + schema.text + "': an op takes at most " +
                                std::to_string(kMaxArguments) + " arguments");
  }
  if (parameters.size() != expected) {
    throw std::invalid_argument("schema '" + schema.text + "' has " + std::to_string(expected) +
                                " arguments, its function has " +
                                std::to_string(parameters.size()) + " parameters");
  }
  for (size_t i = 0; i < expected; ++i) {
    const Argument& argument = schema.arguments[i];
    if (argument.kind != parameters[i]) {
      throw std::invalid_argument("schema '" + schema.text + "' says that " + argument.name +
                                  " is " + kind_name(argument.kind) + ", its function takes " +
                                  kind_name(parameters[i]));
    }
  }
}

// What holds for the tensors of every op.
void check_tensors(const std::vector<Argument>& arguments, const Value* values) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Kind kind = arguments[i].kind;
    if (kind != Kind::kTensor && kind != Kind::kOptionalTensor) continue;
    const View& view = values[i].view;
    if (!view.present) continue;
    check_rank(view);
    if (arguments[i].written) check_no_self_overlap(view);
  }
}

}  // namespace

ModuleRegistration::ModuleRegistration(void (*define)(Module&)) { definitions().push_back(define); }

void Module::add(const char* text, const std::vector<Kind>& parameters, Op::Function function,
                 Op::Invoke invoke) {
  Schema schema = parse_schema(text);
  check_parameters(schema, parameters);
  for (const Op& op : ops()) {
    if (op.schema.name == schema.name) {
      throw std::invalid_argument("op '" + schema.name + "' is registered twice: '" +
                                  op.schema.text + "' and '" + schema.text + "'");
    }
  }
  ops().push_back({std::move(schema), function, invoke});
}

const Op* op_table = nullptr;

const std::vector<Op>& all_ops() {
  if (op_table == nullptr) {
    Module module;
    for (auto* define : definitions()) define(module);
    op_table = ops().data();
  }
  return ops();
}

void run(const Op& op, const Value* values) {
  try {
    check_tensors(op.schema.arguments, values);
    op.invoke(op.function, values);
  } catch (const std::exception& e) {
    throw std::runtime_error(op.schema.name + ": " + e.what());
  }
}

}  // namespace opweave
