#include "registry.h"

#include <stdexcept>

#include "check.h"
#include "cuda.h"
#include "utf8.h"

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

[[noreturn]] void reject(const Schema& schema, const std::string& why) {
  throw std::invalid_argument("schema '" + schema.text + "'" + why);
}

void check_limit(const Schema& schema, size_t count, size_t limit, const char* what) {
  if (count <= limit) return;
  reject(schema, " has " + std::to_string(count) + " " + what + "; an op has at most " +
                     std::to_string(limit));
}

void check_parameters(const Schema& schema, const std::vector<Type>& parameters) {
  const size_t expected = schema.arguments.size();
  check_limit(schema, expected, kMaxArguments, "arguments");
  if (parameters.size() != expected) {
    reject(schema, " has " + std::to_string(expected) + " arguments, its function has " +
                       std::to_string(parameters.size()) + " parameters");
  }
  for (size_t i = 0; i < expected; ++i) {
    const Argument& argument = schema.arguments[i];
    if (argument.type != parameters[i]) {
      reject(schema, " says that " + argument.name + " is " + type_name(argument.type) +
                         ", its function takes " + type_name(parameters[i]));
    }
  }
}

void check_returns(const Schema& schema, const std::vector<Kind>& returns) {
  check_limit(schema, schema.returns.size(), kMaxResults, "results");
  if (schema.returns == returns) return;
  reject(schema, " returns " + returns_name(schema.returns) + ", its function returns " +
                     returns_name(returns));
}

Op& find_or_add(const Schema& schema) {
  for (Op& op : ops()) {
    if (op.schema.name == schema.name) return op;
  }
  ops().push_back({schema, {}});
  return ops().back();
}

// The checks that apply to the tensors of every op.
void check_tensors(const Op& op, const Value* values) {
  const std::vector<Argument>& arguments = op.schema.arguments;
  const View& first = values[op.schema.first_tensor].view;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type.kind != Kind::kTensor || !values[i].present) continue;
    const View& view = values[i].view;
    check_rank(view);
    check_same_device(view, first);
    if (arguments[i].written) check_no_self_overlap(view);
  }
}

[[noreturn]] void fail_missing(Device device) {
  throw CheckFailed(std::string("there is no implementation for ") + device_name(device) +
                    " tensors");
}

}  // namespace

ModuleRegistration::ModuleRegistration(void (*define)(Module&)) { definitions().push_back(define); }

void Module::add(Device device, const char* text, const Signature& signature,
                 Implementation implementation) {
  const Schema schema = parse_schema(text);
  if (implementation.function == nullptr) reject(schema, " has a null pointer for its function");
  check_parameters(schema, signature.parameters);
  check_returns(schema, signature.returns);
  Op& op = find_or_add(schema);
  if (op.runs_on(device)) {
    throw std::invalid_argument("op '" + schema.name + "' is registered twice for " +
                                device_name(device) + ": '" + op.schema.text + "' and '" +
                                schema.text + "'");
  }
  if (op.schema.text != schema.text) {
    throw std::invalid_argument("op '" + schema.name + "' has two schemas: '" + op.schema.text +
                                "' and '" + schema.text + "'");
  }
  op.implementations[static_cast<int>(device)] = implementation;
}

const Op* op_table = nullptr;

const std::vector<Op>& all_ops() {
  if (op_table == nullptr) {
    ops().clear();  // left over from a failed import
    Module module;
    for (auto* define : definitions()) define(module);
    op_table = ops().data();
  }
  return ops();
}

void run(const Op& op, const Value* values, Scalar* results) {
  try {
    check_tensors(op, values);
    const View& first = values[op.schema.first_tensor].view;
    const Implementation& implementation = op.on(first.device);
    if (implementation.function == nullptr) fail_missing(first.device);
    const CurrentDevice device(first);
    implementation.invoke(implementation.function, values, results);
  } catch (const std::exception& e) {
    throw std::runtime_error(op.schema.name + ": " + valid_utf8(e.what()));
  } catch (...) {
    throw std::runtime_error(op.schema.name + ": its function threw something other than a "
                                              "std::exception");
  }
}

}  // namespace opweave
