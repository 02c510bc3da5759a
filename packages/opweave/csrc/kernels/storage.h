// Select the template instance of a kernel for the storage types of a call.
#pragma once

#include "kernels/kernels.h"
#include "kernels/vec.h"

namespace {

// Call visit with a value of the storage type.
template <class Visit>
inline void with_storage(OpweaveDtype dtype, Visit visit) {
  switch (dtype) {
    case OPWEAVE_FLOAT32: return visit(float{});
    case OPWEAVE_BFLOAT16: return visit(BFloat16{});
    case OPWEAVE_FLOAT16: return visit(Float16{});
    default: return;  // callers check the dtype
  }
}

// Call Rows::run<T>(begin, end, call) for the call's storage type.
template <class Rows, class Call>
void run_for_type(int64_t begin, int64_t end, void* erased) {
  const Call& call = *static_cast<const Call*>(erased);
  with_storage(call.dtype, [&](auto storage) {
    Rows::template run<decltype(storage)>(begin, end, call);
  });
}

// Call Rows::run<T, W>(begin, end, call) for the call's storage type and that of its weights.
template <class Rows, class Call>
void run_for_weight_type(int64_t begin, int64_t end, void* erased) {
  const Call& call = *static_cast<const Call*>(erased);
  with_storage(call.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.weight_dtype == OPWEAVE_FLOAT32) {
      Rows::template run<T, float>(begin, end, call);
    } else {
      Rows::template run<T, T>(begin, end, call);
    }
  });
}

}  // namespace
