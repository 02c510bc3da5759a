// Look up functions of loaded libraries by name.
#pragma once

#include <dlfcn.h>

#include <strings.h>

#include <cstdlib>

namespace opweave {

// Whether to use what torch does not document: C++ symbols without a stability guarantee, and where
// a Python tensor contains the C++ tensor. Without them, every call works through torch's Python
// API, its stable C ABI and DLPack, but takes longer.
inline bool may_use_torch_internals() {
  const char* value = std::getenv("OPWEAVE_NATIVE_TORCH_INTERNALS");
  if (value == nullptr) return true;
  for (const char* off : {"", "0", "false", "no", "off"}) {
    if (strcasecmp(value, off) == 0) return false;
  }
  return true;
}

// Set *target to the function. Returns false and leaves *target unchanged if it does not exist.
template <class Function>
bool bind_symbol(const char* library_name, const char* symbol, Function* target) {
  void* library = dlopen(library_name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return false;
  auto* found = reinterpret_cast<Function>(dlsym(library, symbol));
  if (found == nullptr) return false;
  *target = found;
  return true;
}

}  // namespace opweave
