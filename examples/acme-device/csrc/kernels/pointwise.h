// Element by element, each step rounded to T as the ops' native implementations round it.

#pragma once

#include <cmath>

#include "rows.h"

namespace acme::kernels {

// out = silu(x[:n]) * x[n:], for one row.
template <class T>
void silu_and_mul(T* out, const T* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float gate = float(x[i]);
    out[i] = T(float(T(gate / (1.0f + std::exp(-gate)))) * float(x[n + i]));
  }
}

// out = residual + x * scale.
template <class T>
void scaled_residual(T* out, const T* x, const T* residual, float scale, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = T(float(residual[i]) + float(T(float(x[i]) * scale)));
}

// Rotates the first 2 * half dimensions of one head, in place. A row of the table is `half` cosines
// and then `half` sines, of type C; they are rounded to T first.
template <class T, class C>
void rotate(T* head, const C* angles, std::int64_t half, bool neox) {
  for (std::int64_t i = 0; i < half; ++i) {
    T& first = head[neox ? i : 2 * i];
    T& second = head[neox ? half + i : 2 * i + 1];
    const float a = float(first), b = float(second);
    const float cos = float(T(float(angles[i]))), sin = float(T(float(angles[half + i])));
    first = T(float(T(a * cos)) - float(T(b * sin)));
    second = T(float(T(b * cos)) + float(T(a * sin)));
  }
}

}  // namespace acme::kernels
