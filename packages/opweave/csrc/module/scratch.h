// Scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "core/check.h"

namespace opweave {

// Return at least `floats` floats, aligned to a cache line and valid until the thread's next call
// of this function, or null if out of memory. The memory is kept between calls to avoid page
// faults.
inline float* scratch_or_null(int64_t floats) noexcept {
  constexpr size_t kAlignment = 64;
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t capacity = 0;
  const int64_t wanted = floats + static_cast<int64_t>(kAlignment / sizeof(float));
  if (capacity < wanted) {
    capacity = 0;
    memory.reset();
    memory.reset(new (std::nothrow) float[static_cast<size_t>(wanted)]);
    if (memory == nullptr) return nullptr;
    capacity = wanted;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<float*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

[[noreturn]] inline void fail_without_scratch(int64_t floats) {
  throw CheckFailed("there is no memory for " + std::to_string(floats * 4) +
                    " bytes to compute in; free some, or take fewer tokens at once");
}

// Return scratch memory, or throw if out of memory.
inline float* scratch_of(int64_t floats) {
  float* scratch = scratch_or_null(floats);
  if (scratch == nullptr) fail_without_scratch(floats);
  return scratch;
}

}  // namespace opweave
