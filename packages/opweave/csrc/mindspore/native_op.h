// Run a native op by name: argument checks and kernel, as in torch's call paths.
//
// This is a C interface, because the two sides use different C++ ABIs: MindSpore's builder compiles
// with _GLIBCXX_USE_CXX11_ABI=0.
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
  int32_t present;  // 0: an optional tensor is None
};

// The schema of the op determines which member is set.
struct OpweaveArgument {
  struct OpweaveTensor tensor;
  int64_t integer;
  double number;
};

// Returns null, or an error message, which is valid until the thread's next call.
const char* opweave_run_op(const char* name, const struct OpweaveArgument* arguments, size_t count);

#ifdef __cplusplus
}
#endif
