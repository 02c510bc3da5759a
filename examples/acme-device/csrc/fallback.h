// Operators without a kernel run on the host, and are counted.

#pragma once

#include <ATen/core/Dict.h>

#include <cstdint>
#include <string>

namespace acme {

c10::Dict<std::string, std::int64_t> fallbacks();

void reset_fallbacks();

}  // namespace acme
