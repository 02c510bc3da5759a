// Select the kernels for this CPU when the module is loaded.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(OPWEAVE_HAVE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/kernels.h"

extern "C" {
extern const OpweaveKernels opweave_all_kernels_base;
extern const OpweaveKernels opweave_all_kernels_avx2;
extern const OpweaveKernels opweave_all_kernels_avx512;
extern const OpweaveKernels opweave_all_kernels_avx512bf16;
extern const OpweaveKernels opweave_all_kernels_amx;
}

namespace {

struct Isa {
  const OpweaveKernels& kernels;
  bool (*is_supported)();
};

#if defined(__x86_64__)
bool cpu_has_v2() { return __builtin_cpu_supports("x86-64-v2") != 0; }
#endif
#if defined(OPWEAVE_HAVE_AVX2)
bool cpu_has_avx2() { return __builtin_cpu_supports("x86-64-v3") != 0; }
#endif
#if defined(OPWEAVE_HAVE_AVX512)
bool cpu_has_avx512() { return __builtin_cpu_supports("x86-64-v4") != 0; }
#endif
#if defined(OPWEAVE_HAVE_AVX512BF16)
bool cpu_has_avx512bf16() {
  return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("avx512vnni") != 0;
}
#endif
#if defined(OPWEAVE_HAVE_AMX)
// Request permission from Linux to use AMX tile data, which holds for all threads of the process.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // the XSAVE state component
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

bool cpu_has_amx() {
  return cpu_has_avx512bf16() && __builtin_cpu_supports("avx512fp16") != 0 &&
         __builtin_cpu_supports("amx-tile") != 0 && __builtin_cpu_supports("amx-bf16") != 0 &&
         may_use_tiles();
}
#endif

// Best first.
const Isa kIsas[] = {
#if defined(OPWEAVE_HAVE_AMX)
    {opweave_all_kernels_amx, cpu_has_amx},
#endif
#if defined(OPWEAVE_HAVE_AVX512BF16)
    {opweave_all_kernels_avx512bf16, cpu_has_avx512bf16},
#endif
#if defined(OPWEAVE_HAVE_AVX512)
    {opweave_all_kernels_avx512, cpu_has_avx512},
#endif
#if defined(OPWEAVE_HAVE_AVX2)
    {opweave_all_kernels_avx2, cpu_has_avx2},
#endif
#if defined(__x86_64__)
    {opweave_all_kernels_base, cpu_has_v2},
#else
    {opweave_all_kernels_base, [] { return true; }},
#endif
};

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
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Isa& isa : kIsas) {
    if (isa.is_supported() && i-- == 0) return isa.kernels.isa;
  }
  return nullptr;
}

extern "C" const char* opweave_select_isa(const char* name) {
  if (name == nullptr) name = opweave_available_isa(0);
  if (name == nullptr) return refuse("base", "needs x86-64-v2, which this CPU lacks");
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.kernels.isa, name) != 0) continue;
    if (!isa.is_supported()) return refuse(name, "is not supported by this CPU");
    active = &isa.kernels;
    return nullptr;
  }
  return refuse(name, "is unknown");
}
