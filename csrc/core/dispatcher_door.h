// Door A: the ops as torch.ops.<namespace>.<op>, which graphs can hold.
#pragma once

#include <string>

namespace opweave {

// Register every op with torch's dispatcher, for the devices that it runs on. Returns "" or why that is impossible.
// Further calls do nothing.
std::string open_dispatcher_door(const char* torch_namespace);

}  // namespace opweave
