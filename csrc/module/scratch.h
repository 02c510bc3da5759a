// Memory to compute in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace opweave {

// At least `floats` floats, aligned to a cache line, until the thread's next call of this function.
// Kept between calls: fresh memory would fault page by page.
inline float* scratch_of(int64_t floats) {
  constexpr size_t kAlignment = 64;
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t capacity = 0;
  const int64_t wanted = floats + static_cast<int64_t>(kAlignment / sizeof(float));
  if (capacity < wanted) {
    memory.reset(new float[static_cast<size_t>(wanted)]);
    capacity = wanted;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<float*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace opweave
