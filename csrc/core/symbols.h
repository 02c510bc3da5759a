// Functions of libraries that this process has loaded, looked up by name.
#pragma once

#include <dlfcn.h>

namespace opweave {

// Set *target to the function; leave it as it is, and return false, where there is none.
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
