#include "schema.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace opweave {
namespace {

[[noreturn]] void reject(const std::string& text, const std::string& why) {
  throw std::invalid_argument("schema '" + text + "': " + why);
}

// Replace line breaks and repeated whitespace with single spaces.
std::string in_one_line(const std::string& text) {
  std::istringstream words(text);
  std::string line;
  for (std::string word; words >> word;) line += (line.empty() ? "" : " ") + word;
  return line;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

// Split "a, b" at commas; "" gives an empty list.
std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  if (trimmed(list).empty()) return parts;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    parts.push_back(trimmed(list.substr(begin, comma - begin)));
    begin = comma + 1;
  }
  return parts;
}

bool is_identifier(const std::string& name) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  const auto fits = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9'); };
  return !name.empty() && is_letter(name[0]) && std::all_of(name.begin(), name.end(), fits);
}

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kTensor: return "Tensor";
    case Kind::kInteger: return "int";
    case Kind::kNumber: return "float";
    case Kind::kFlag: return "bool";
    case Kind::kIntegerList: return "int[]";
  }
  return "?";
}

Type parse_type(const std::string& schema, const std::string& type) {
  const bool optional = !type.empty() && type.back() == '?';
  const std::string bare = optional ? type.substr(0, type.size() - 1) : type;
  for (Kind kind :
       {Kind::kTensor, Kind::kInteger, Kind::kNumber, Kind::kFlag, Kind::kIntegerList}) {
    if (bare == kind_name(kind)) return {kind, optional};
  }
  reject(schema, "argument type '" + type +
                     "' is not one of Tensor, int, float, bool, int[], or one of these with '?'");
}

// Return "Tensor?" for "Tensor(a!)?", and set *written.
std::string without_alias(const std::string& schema, const std::string& type, bool* written) {
  const size_t open = type.find('(');
  if (open == std::string::npos) return type;
  const size_t close = type.find(')', open);
  if (close == std::string::npos) reject(schema, "'" + type + "' lacks a ')'");
  *written = type.find('!') < close;
  if (!*written) reject(schema, "'" + type + "' should be Tensor, or Tensor(a!) if it is written");
  return type.substr(0, open) + type.substr(close + 1);
}

Argument parse_argument(const std::string& schema, const std::string& text) {
  if (text.find('=') != std::string::npos) reject(schema, "defaults are not supported");
  const size_t space = text.rfind(' ');
  if (space == std::string::npos) reject(schema, "argument '" + text + "' has no name");
  Argument argument{text.substr(space + 1), {Kind::kTensor, false}, false};
  if (!is_identifier(argument.name)) reject(schema, "'" + argument.name + "' is not a name");
  const std::string type =
      without_alias(schema, trimmed(text.substr(0, space)), &argument.written);
  argument.type = parse_type(schema, type);
  if (argument.written && argument.type.kind != Kind::kTensor) {
    reject(schema, "only a Tensor can be written, not " + argument.name);
  }
  return argument;
}

Kind parse_return(const std::string& schema, const std::string& text) {
  const std::string type = text.substr(0, text.find(' '));  // a name may follow
  for (Kind kind : {Kind::kInteger, Kind::kNumber, Kind::kFlag}) {
    if (type == kind_name(kind)) return kind;
  }
  reject(schema, "an op returns (), int, float, bool, or several of these such as (int, float), "
                 "and writes tensors that it is given; '" + text + "' is neither");
}

std::vector<Kind> parse_returns(const std::string& schema, const std::string& text) {
  const bool in_brackets = text.size() >= 2 && text.front() == '(' && text.back() == ')';
  std::vector<Kind> returns;
  if (!in_brackets) {
    returns.push_back(parse_return(schema, text));
    return returns;
  }
  for (const std::string& part : split(text.substr(1, text.size() - 2))) {
    returns.push_back(parse_return(schema, part));
  }
  return returns;
}

// torch dispatches on the tensors of a call, so there must be at least one.
size_t find_first_tensor(const Schema& schema) {
  const Type tensor{Kind::kTensor, false};
  for (size_t i = 0; i < schema.arguments.size(); ++i) {
    if (schema.arguments[i].type == tensor) return i;
  }
  reject(schema.text, "an op needs an argument of type Tensor");
}

void check_names(const Schema& schema) {
  // Names with a leading underscore are reserved for the module, such as _open.
  if (!is_identifier(schema.name) || schema.name[0] == '_') {
    reject(schema.text, "'" + schema.name + "' is not a name for an op (letters, digits and "
                        "underscores, starting with a letter)");
  }
  for (size_t i = 0; i < schema.arguments.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (schema.arguments[i].name == schema.arguments[j].name) {
        reject(schema.text, "two arguments are called " + schema.arguments[i].name);
      }
    }
  }
}

}  // namespace

std::string type_name(const Type& type) {
  return std::string(kind_name(type.kind)) + (type.optional ? "?" : "");
}

std::string returns_name(const std::vector<Kind>& returns) {
  if (returns.size() == 1) return kind_name(returns[0]);
  std::string text;
  for (Kind kind : returns) text += (text.empty() ? "" : ", ") + std::string(kind_name(kind));
  return "(" + text + ")";
}

Schema parse_schema(const std::string& written) {
  const std::string text = in_one_line(written);
  const size_t open = text.find('(');
  const size_t arrow = text.rfind("->");
  const size_t close = arrow == std::string::npos ? arrow : text.rfind(')', arrow);
  if (open == std::string::npos || close == std::string::npos || close < open ||
      !trimmed(text.substr(close + 1, arrow - close - 1)).empty()) {
    reject(text, "expected 'name(arguments) -> ()'");
  }
  Schema schema{text, trimmed(text.substr(0, open)), {}, {}, 0};
  for (const std::string& part : split(text.substr(open + 1, close - open - 1))) {
    schema.arguments.push_back(parse_argument(text, part));
  }
  check_names(schema);
  schema.returns = parse_returns(text, trimmed(text.substr(arrow + 2)));
  schema.first_tensor = find_first_tensor(schema);
  return schema;
}

}  // namespace opweave
