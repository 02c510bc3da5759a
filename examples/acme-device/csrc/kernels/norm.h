// Root-mean-square norm, alone and after an addition.

#pragma once

#include <cmath>

#include "rows.h"

namespace acme::kernels {

// out = T(W(x * rsqrt(mean(x * x) + epsilon)) * weight), for one row; weight may be null.
template <class T, class W>
void rms_norm(T* out, const T* x, const W* weight, float epsilon, std::int64_t n) {
  const float factor = 1.0f / std::sqrt(dot(x, x, n) / float(n) + epsilon);
  for (std::int64_t i = 0; i < n; ++i) {
    const float normed = float(x[i]) * factor;
    out[i] = weight == nullptr ? T(normed) : T(float(W(float(W(normed)) * float(weight[i]))));
  }
}

// residual += x, then x = rms_norm(residual), for one row.
template <class T, class W>
void add_rms_norm(T* x, T* residual, const W* weight, float epsilon, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) residual[i] = T(float(x[i]) + float(residual[i]));
  rms_norm(x, residual, weight, epsilon, n);
}

}  // namespace acme::kernels
