// The dispatcher call: the ops as torch.ops.<namespace>.<op>, which graphs can hold.
#pragma once

#include <string>

namespace opweave {

// Register every op with the dispatcher of torch, for the devices that it runs on. Returns "" or why
// that is impossible.
// Further calls do nothing.
std::string open_dispatcher_call(const char* torch_namespace);

}  // namespace opweave
