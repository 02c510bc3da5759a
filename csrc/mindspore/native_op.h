// Runs a native op by name: argument checks and kernel, as behind torch's call paths.
//
// A C interface, because the two sides are built with different C++ standard libraries' layouts:
// MindSpore's builder compiles for the old one (_GLIBCXX_USE_CXX11_ABI=0).
#pragma once

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

struct OpweaveTensor {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;  // in elements
  int32_t rank;
  enum OpweaveDtype dtype;
  int32_t present;  // 0: None, for an optional tensor
};

// Which member holds the value follows from the op's schema.
struct OpweaveArgument {
  struct OpweaveTensor tensor;
  int64_t integer;
  double number;
};

// Returns null, or why the op did not run. The text is valid until the thread's next call.
const char* opweave_run_op(const char* name, const struct OpweaveArgument* arguments, size_t count);

#ifdef __cplusplus
}
#endif
