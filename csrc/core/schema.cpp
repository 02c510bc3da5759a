#include "core/schema.h"

#include <algorithm>
#include <stdexcept>

namespace opweave {
namespace {

[[noreturn]] void reject(const std::string& text, const std::string& why) {
  throw std::invalid_argument("schema '" + text + "': " + why);
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

Kind parse_kind(const std::string& schema, const std::string& type) {
  for (Kind kind : {Kind::kTensor, Kind::kOptionalTensor, Kind::kInteger, Kind::kNumber,
                    Kind::kFlag}) {
    if (type == kind_name(kind)) return kind;
  }
  reject(schema, "argument type '" + type + "' is not one of Tensor, Tensor?, int, float, bool");
}

// "Tensor(a!)" -> "Tensor", noting the mutation
std::string without_alias(const std::string& type, bool* written) {
  const size_t open = type.find('(');
  if (open == std::string::npos) return type;
  const size_t close = type.find(')', open);
  *written = type.find('!') != std::string::npos;
  return type.substr(0, open) + type.substr(close + 1);
}

Argument parse_argument(const std::string& schema, const std::string& text) {
  const size_t space = text.rfind(' ');
  if (space == std::string::npos) reject(schema, "argument '" + text + "' has no name");
  Argument argument{text.substr(space + 1), Kind::kTensor, false};
  if (argument.name.find('=') != std::string::npos) reject(schema, "defaults are not supported");
  const std::string type = without_alias(trimmed(text.substr(0, space)), &argument.written);
  argument.kind = parse_kind(schema, type);
  return argument;
}

}  // namespace

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kTensor: return "Tensor";
    case Kind::kOptionalTensor: return "Tensor?";
    case Kind::kInteger: return "int";
    case Kind::kNumber: return "float";
    case Kind::kFlag: return "bool";
  }
  return "?";
}

Schema parse_schema(const std::string& text) {
  const size_t open = text.find('(');
  const size_t arrow = text.rfind("->");
  if (open == std::string::npos || arrow == std::string::npos) {
    reject(text, "expected 'name(arguments) -> ()'");
  }
  if (trimmed(text.substr(arrow + 2)) != "()") reject(text, "an op must write into its arguments");
  const size_t close = text.rfind(')', arrow);
  if (close == std::string::npos || close < open) reject(text, "expected ')' before '->'");
  Schema schema{text, trimmed(text.substr(0, open)), {}};
  const std::string list = text.substr(open + 1, close - open - 1);
  for (size_t begin = 0; begin < list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    schema.arguments.push_back(parse_argument(text, trimmed(list.substr(begin, comma - begin))));
    begin = comma + 1;
  }
  return schema;
}

}  // namespace opweave
