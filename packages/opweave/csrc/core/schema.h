// Parser for torch schema strings.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace opweave {

enum class Kind { kTensor, kInteger, kNumber, kFlag, kIntegerList };

struct Type {
  Kind kind;
  bool optional;

  bool operator==(const Type& other) const {
    return kind == other.kind && optional == other.optional;
  }
  bool operator!=(const Type& other) const { return !(*this == other); }
};

struct Argument {
  std::string name;
  Type type;
  bool written;  // annotated as mutated: Tensor(a!)
};

struct Schema {
  std::string text;
  std::string name;
  std::vector<Argument> arguments;
  std::vector<Kind> returns;
  size_t first_tensor;  // the first non-optional tensor, which determines the device
};

// Parse "name(Tensor(a!) out, Tensor? weight, int[] sizes, float? epsilon) -> (int, float)".
// Arguments are Tensor, int, float, bool and int[], optionally with "?", without defaults; results
// are int, float and bool. Throws std::invalid_argument for anything else.
Schema parse_schema(const std::string& written);

// Return a type as in a schema: "Tensor?".
std::string type_name(const Type& type);

// Return results as in a schema: "()", "int", "(int, float)".
std::string returns_name(const std::vector<Kind>& returns);

}  // namespace opweave
