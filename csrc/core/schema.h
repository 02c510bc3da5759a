// What a torch schema string says about an op's arguments.
#pragma once

#include <string>
#include <vector>

namespace opweave {

enum class Kind { kTensor, kOptionalTensor, kInteger, kNumber, kFlag };

struct Argument {
  std::string name;
  Kind kind;
  bool written;  // annotated as mutated: Tensor(a!)
};

struct Schema {
  std::string text;
  std::string name;
  std::vector<Argument> arguments;
};

// Parse "name(Tensor(a!) out, Tensor? weight, float epsilon) -> ()". Takes Tensor, Tensor?, int,
// float and bool without defaults, and ops that return nothing; throws std::invalid_argument
// otherwise.
Schema parse_schema(const std::string& text);

// How a schema spells a kind: "Tensor?".
const char* kind_name(Kind kind);

}  // namespace opweave
