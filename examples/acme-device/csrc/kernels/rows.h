// Code shared by the kernels. Memory is on the host, numbers are float, bfloat16 or half. Sums are in
// float with a fixed order of terms, so a row's result does not depend on other rows.

#pragma once

#include <cstdint>

namespace acme::kernels {

constexpr int kLanes = 16;  // partial sums, which the compiler keeps in vector registers

// Returns the sum of a[i] * b[i].
template <class A, class B>
float dot(const A* a, const B* b, std::int64_t n) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += float(a[i + l]) * float(b[i + l]);
  }
  for (; i < n; ++i) lanes[0] += float(a[i]) * float(b[i]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

template <class T>
void widen(float* out, const T* in, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = float(in[i]);
}

}  // namespace acme::kernels
