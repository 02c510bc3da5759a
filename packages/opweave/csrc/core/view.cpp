#include "view.h"

namespace opweave {

const char* dtype_name(OpweaveDtype dtype) {
  switch (dtype) {
    case OPWEAVE_FLOAT32: return "float32";
    case OPWEAVE_BFLOAT16: return "bfloat16";
    case OPWEAVE_FLOAT16: return "float16";
    case OPWEAVE_FLOAT64: return "float64";
    case OPWEAVE_INT8: return "int8";
    case OPWEAVE_INT16: return "int16";
    case OPWEAVE_INT32: return "int32";
    case OPWEAVE_INT64: return "int64";
    case OPWEAVE_UINT8: return "uint8";
    case OPWEAVE_BOOL: return "bool";
    case OPWEAVE_FLOAT8_E4M3FN: return "float8_e4m3fn";
    case OPWEAVE_OTHER_DTYPE: break;
  }
  return "a dtype that no native kernel takes";
}

const char* device_name(Device device) { return device == Device::kCpu ? "CPU" : "CUDA"; }

std::string to_string(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

std::string describe(const View& view) {
  return std::string(dtype_name(view.dtype)) + " " + to_string(view.sizes, view.rank) +
         " with strides " + to_string(view.strides, view.rank);
}

}  // namespace opweave
