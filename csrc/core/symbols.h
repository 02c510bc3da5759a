// Look up functions of loaded libraries by name.
#pragma once

#include <dlfcn.h>

namespace opweave {

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
