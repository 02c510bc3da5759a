// The part of the C layout of DLPack 1.x that opweave reads. Specification: dlpack.h of
// dmlc/dlpack.
#pragma once

#include <cstdint>

namespace opweave::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4m3fn = 10,
};

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t rank;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};

// The struct behind torch.Tensor.__dlpack_c_exchange_api__.
struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  ExchangeApi* previous;
  void (*allocate)();
  void (*managed_from_python)();
  void (*managed_to_python)();
  int (*borrow_from_python)(void* object, Tensor* result);  // may be null
  void (*current_stream)();
};

}  // namespace opweave::dlpack
