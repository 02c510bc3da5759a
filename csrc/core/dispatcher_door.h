// Door A: the ops as torch.ops.opweave_c.<op>, which graphs can hold.
#pragma once

#include <string>

namespace opweave {

// Register every op with torch's dispatcher for CPU tensors. Returns "" or why that is impossible.
// Further calls do nothing.
std::string open_dispatcher_door();

}  // namespace opweave
