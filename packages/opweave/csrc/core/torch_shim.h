// The part of torch's stable C ABI that opweave uses, bound at run time.
//
// These are opweave's own declarations of functions that libtorch exports with C linkage and a
// stability guarantee (since torch 2.10). torch is not needed at build time, and with a torch that
// lacks these functions, the module still loads, without torch ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "types.h"

namespace opweave {

#if defined(__APPLE__)
constexpr const char* kTorchLibrary = "libtorch_cpu.dylib";
#else
constexpr const char* kTorchLibrary = "libtorch_cpu.so";
#endif

using TorchError = int32_t;  // 0 is success
using TorchTensor = struct TorchTensorOpaque*;
using TorchList = struct TorchListOpaque*;
using TorchLibrary = struct TorchLibraryOpaque*;
using StackValue = uint64_t;  // one slot of a boxed call
using BoxedKernel = void (*)(StackValue* stack, uint64_t inputs, uint64_t outputs);
using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

struct TorchShim {
  TorchError (*library_init_fragment)(const char* name, const char* file, uint32_t line,
                                      TorchLibrary* result);
  TorchError (*library_init_impl)(const char* name, const char* key, const char* file,
                                  uint32_t line, TorchLibrary* result);
  TorchError (*library_def)(TorchLibrary library, const char* schema);
  TorchError (*library_impl)(TorchLibrary library, const char* name, BoxedKernel kernel,
                             uint64_t built_for);
  TorchError (*delete_tensor)(TorchTensor tensor);
  TorchError (*get_data)(TorchTensor tensor, const void** result);
  // Materializes a lazy (copy-on-write) clone first.
  TorchError (*get_mutable_data)(TorchTensor tensor, void** result);
  TorchError (*get_dim)(TorchTensor tensor, int64_t* result);
  TorchError (*get_sizes)(TorchTensor tensor, int64_t** result);
  TorchError (*get_strides)(TorchTensor tensor, int64_t** result);
  TorchError (*get_dtype)(TorchTensor tensor, int32_t* result);
  TorchError (*get_device_type)(TorchTensor tensor, int32_t* result);
  TorchError (*get_device_index)(TorchTensor tensor, int32_t* result);
  TorchError (*parallel_for)(int64_t begin, int64_t end, int64_t grain, RangeFunction body,
                             void* context);
  TorchError (*list_size)(TorchList list, size_t* result);
  TorchError (*list_get)(TorchList list, size_t index, StackValue* result);
  TorchError (*delete_list)(TorchList list);

  // Throws torch's own error, a RuntimeError in Python, unless the condition holds.
  void (*check)(bool condition, const char* function, const char* file, uint32_t line,
                const char* message);

  int32_t cpu;  // codes of device types
  int32_t cuda;

  TorchError (*get_num_threads)(uint32_t* result);             // null if torch lacks it
  TorchError (*is_defined)(TorchTensor tensor, bool* result);  // likewise

  // Since torch 2.13; otherwise null.
  const char* (*last_error)();
  TorchError (*delete_stack_value)(StackValue* value);
};

// The bound functions; all null until bind_torch_shim() succeeds.
const TorchShim& torch_shim();

// Bind to the libtorch of this process. Returns "" or an error message.
std::string bind_torch_shim();

// Return opweave's dtype for torch's dtype code.
OpweaveDtype dtype_of_torch(int32_t torch_dtype);

}  // namespace opweave
