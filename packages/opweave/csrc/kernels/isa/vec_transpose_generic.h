// transpose with the vector types of GCC and Clang; see vec_transpose.h.
#pragma once

#include "kernels/vec.h"

namespace {

inline void transpose(Vec (&v)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    for (int k = 0; k < i; ++k) {
      const float lane = v[i][k];
      v[i][k] = v[k][i];
      v[k][i] = lane;
    }
  }
}

}  // namespace
