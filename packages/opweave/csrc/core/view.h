// A framework-independent view of a strided tensor.
#pragma once

#include <cstdint>
#include <string>

#include "types.h"

namespace opweave {

enum class Device : uint8_t { kCpu, kCuda };
constexpr int kDevices = 2;

// Borrows sizes, strides (in elements) and data, which are valid during the call.
struct View {
  const char* name;  // the argument's name in the schema
  char* data;
  const int64_t* sizes;
  const int64_t* strides;
  int rank;
  OpweaveDtype dtype;
  int device_index;
  Device device;

  int64_t element_count() const {
    int64_t count = 1;
    for (int d = 0; d < rank; ++d) count *= sizes[d];
    return count;
  }

  // Throws for a dtype that native kernels do not support, since its size is unknown.
  int64_t element_size() const;

  // The number of elements from the first to the last, including gaps; 0 for an empty tensor.
  int64_t extent() const {
    int64_t last = 0;
    for (int d = 0; d < rank; ++d) {
      if (sizes[d] == 0) return 0;
      last += (sizes[d] - 1) * strides[d];
    }
    return last + 1;
  }

  // Whether the storage was freed, or is missing (zero tensors of forward-mode AD).
  bool lacks_memory() const { return data == nullptr && element_count() > 0; }

  // The end address of the last element.
  const char* end() const { return data + extent() * element_size(); }
};

// Throws an error for an unsupported dtype.
[[noreturn]] void fail_unknown_dtype(const View& view);

inline int64_t View::element_size() const {
  // In the order of OpweaveDtype.
  constexpr uint8_t kSizes[] = {4, 2, 2, 8, 1, 2, 4, 8, 1, 1, 1};
  static_assert(sizeof(kSizes) == OPWEAVE_OTHER_DTYPE);
  if (dtype == OPWEAVE_OTHER_DTYPE) fail_unknown_dtype(*this);
  return kSizes[dtype];
}

const char* dtype_name(OpweaveDtype dtype);

const char* device_name(Device device);

// "[2, 64]"
std::string to_string(const int64_t* values, int count);

// "bfloat16 [2, 64] with strides [64, 1]"
std::string describe(const View& view);

}  // namespace opweave
