// The dispatcher call path: registers the ops as torch.ops.<namespace>.<op>, for use in graphs.
#pragma once

#include <string>

namespace opweave {

// Register every op with torch's dispatcher, for the devices that it supports. Returns "" or an
// error message. Calling it again is a no-op.
std::string open_dispatcher_call(const char* torch_namespace);

}  // namespace opweave
