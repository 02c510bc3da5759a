// What a torch schema string says about an op.
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
  size_t first_tensor;  // the first argument that is always a tensor: its device is the call's
};

// Parse "name(Tensor(a!) out, Tensor? weight, int[] sizes, float? epsilon) -> (int, float)".
// Arguments are Tensor, int, float, bool and int[], each also with "?", without defaults; results
// are int, float and bool. Throws std::invalid_argument for anything else.
Schema parse_schema(const std::string& written);

// How a schema spells a type: "Tensor?".
std::string type_name(const Type& type);

// How a schema spells results: "()", "int", "(int, float)".
std::string returns_name(const std::vector<Kind>& returns);

}  // namespace opweave
