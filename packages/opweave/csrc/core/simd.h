// Kernels that are compiled once per instruction set ("level"), of which the best one for the CPU
// runs.
//
// Declare a kernel in a header, define it in a source that the build lists as a SIMD source, and
// call it from any other file:
//
//   OPWEAVE_SIMD_KERNEL(scale, void(float* out, const float* x, float factor, int64_t n));
//
//   void OPWEAVE_SIMD(scale)(float* out, const float* x, float factor, int64_t n) { ... }
//
//   scale(out, x, 2, n);
//
// The build defines OPWEAVE_ISA, the level, for SIMD sources. The environment variable OPWEAVE_ISA
// names a level to run instead of the best one, such as avx2; others than these four are ignored.
//
// The linker keeps one copy of an inline function or template instance that is not in an anonymous
// namespace, so a CPU could run the copy of a level that it does not support. The build therefore
// refuses such functions in SIMD sources.
#pragma once

#include <cstdlib>
#include <cstring>

#define OPWEAVE_SIMD_NAME_(name, isa) name##_##isa
#define OPWEAVE_SIMD_NAME(name, isa) OPWEAVE_SIMD_NAME_(name, isa)

namespace opweave {

// Names a function type in a declaration: Signature<void(int)> f;
template <class Function>
using Signature = Function;

}  // namespace opweave

#if defined(OPWEAVE_ISA)

#define OPWEAVE_SIMD(name) OPWEAVE_SIMD_NAME(name, OPWEAVE_ISA)
#define OPWEAVE_SIMD_KERNEL(name, ...) extern "C" opweave::Signature<__VA_ARGS__> OPWEAVE_SIMD(name)

#elif defined(__x86_64__)

namespace opweave {

// Return the index of the level to run, best first: avx512bf16, avx512, avx2, base.
inline int find_simd_level() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const struct {
    const char* name;
    bool is_supported;
  } levels[] = {{"avx512bf16", has_avx512 && __builtin_cpu_supports("avx512bf16")},
                {"avx512", has_avx512},
                {"avx2", has_avx2},
                {"base", true}};
  constexpr int kLevels = sizeof(levels) / sizeof(levels[0]);
  const char* forced = std::getenv("OPWEAVE_ISA");
  for (int i = 0; forced != nullptr && i < kLevels; ++i) {
    if (levels[i].is_supported && std::strcmp(levels[i].name, forced) == 0) return i;
  }
  int best = 0;
  while (!levels[best].is_supported) ++best;
  return best;
}

// Return the kernel to run; the arguments are those of all levels, best first.
template <class Kernel>
Kernel* choose_simd_kernel(Kernel* avx512bf16, Kernel* avx512, Kernel* avx2, Kernel* base) {
  static const int level = find_simd_level();
  Kernel* const kernels[] = {avx512bf16, avx512, avx2, base};
  return kernels[level];
}

}  // namespace opweave

#define OPWEAVE_SIMD_KERNEL(name, ...)                                                      \
  extern "C" opweave::Signature<__VA_ARGS__> name##_avx512bf16, name##_avx512, name##_avx2, \
      name##_base;                                                                          \
  inline opweave::Signature<__VA_ARGS__>* const name = opweave::choose_simd_kernel(         \
      name##_avx512bf16, name##_avx512, name##_avx2, name##_base)

#else

#define OPWEAVE_SIMD_KERNEL(name, ...)                     \
  extern "C" opweave::Signature<__VA_ARGS__> name##_base; \
  inline opweave::Signature<__VA_ARGS__>* const name = name##_base

#endif
