// Select the kernels for this CPU when the module is loaded.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/isa/permission.h"
#include "kernels/kernels.h"

// The build generates kernels/levels.inc from isa/levels.cmake: for each level, best first,
// OPWEAVE_LEVEL(name, whether this CPU supports it, whether it is tuned for this vendor's CPUs).
extern "C" {
#define OPWEAVE_LEVEL(name, supports, suits) extern const OpweaveKernels opweave_all_kernels_##name;
#include "kernels/levels.inc"
#undef OPWEAVE_LEVEL
}

namespace {

struct Level {
  const OpweaveKernels* kernels;
  bool is_supported;
};

struct Levels {
  static constexpr size_t kCount = 0
#define OPWEAVE_LEVEL(name, supports, suits) +1
#include "kernels/levels.inc"
#undef OPWEAVE_LEVEL
      ;

  // Reads the CPU's features and vendor with cpuid.
  Levels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    bool suited[kCount];
    size_t count = 0;
#define OPWEAVE_LEVEL(name, supports, suits)                  \
  all[count] = {&opweave_all_kernels_##name, supports};       \
  suited[count++] = suits;
#include "kernels/levels.inc"
#undef OPWEAVE_LEVEL
    for (size_t i = 0; i + 1 < kCount; ++i) {
      if (!suited[i]) {
        std::swap(all[i], all[i + 1]);
        ++i;
      }
    }
  }

  Level all[kCount];  // best first, for this CPU
};

const Levels& levels() {
  static const Levels result;
  return result;
}

const OpweaveKernels* active = nullptr;
char error[256] = "";

void append(char* text, size_t capacity, const char* more) {
  std::strncat(text, more, capacity - std::strlen(text) - 1);
}

const char* refuse(const char* isa, const char* why) {
  std::snprintf(error, sizeof(error), "instruction set '%s' %s; this CPU can run: ", isa, why);
  const char* separator = "";
  for (size_t i = 0; const char* name = opweave_available_isa(i); ++i) {
    append(error, sizeof(error), separator);
    append(error, sizeof(error), name);
    separator = ", ";
  }
  append(error, sizeof(error), *separator == '\0' ? "none of them" : "");
  append(error, sizeof(error), " (set by OPWEAVE_ISA; unset it to choose the best)");
  return error;
}

// A constructor, so that the call path does not have to check for initialization.
__attribute__((constructor)) void select_at_load() {
  const char* forced = std::getenv("OPWEAVE_ISA");
  opweave_select_isa(forced != nullptr && *forced != '\0' ? forced : nullptr);
}

}  // namespace

extern "C" const OpweaveKernels* opweave_kernels() { return active; }

extern "C" const char* opweave_isa_error() { return active == nullptr ? error : nullptr; }

extern "C" const char* opweave_available_isa(size_t i) {
  for (const Level& level : levels().all) {
    if (level.is_supported && i-- == 0) return level.kernels->isa;
  }
  return nullptr;
}

extern "C" const char* opweave_select_isa(const char* name) {
  if (name == nullptr) name = opweave_available_isa(0);
  if (name == nullptr) return refuse("base", "needs x86-64-v2, which this CPU lacks");
  for (const Level& level : levels().all) {
    if (std::strcmp(level.kernels->isa, name) != 0) continue;
    if (!level.is_supported) return refuse(name, "is not supported by this CPU");
    active = level.kernels;
    return nullptr;
  }
  return refuse(name, "is unknown");
}
