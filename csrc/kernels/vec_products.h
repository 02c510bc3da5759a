// Products of two values of type T, rounded to T, by factors that serve for many products.
//
// A product of two 16-bit numbers is exact in float32, and rounding it need not go through the
// narrow type. Dekker's splitting (1971) takes three instructions, the multiplication included: with
// s = (2^k + 1) * p, rounded, s + (p - s) is p without its last k bits, to nearest even; and s is the
// product of x and (2^k + 1) times the factor. With AVX2, where denormals count, it is
// rounded_and_shrunk(), as many instructions, and one more for a sum of products.
//
// Such products are Quick: finish() what was made of them, and look whether it failed(). It did
// where a product may be above what the splitting can do, and for infinities and NaN; then it has to
// be made of Exact ones. Where there is no quick way, Quick is Exact and nothing fails.
#pragma once

#include "kernels/vec.h"

namespace {

struct Exact {};
struct Quick {};

// Set the first n values(), then call ready(n). What follows them, up to a whole vector, is read
// but not used.
template <class T, int64_t kCapacity>
class Factors {
 public:
  float* values() { return values_; }
  void ready(int64_t) {}

  Vec at(int64_t i) const { return Lanes<float>::load(values_ + i, Full{}); }

  template <class Mode>
  Vec product(Vec x, int64_t i, Mode) const {
    return Lanes<T>::round(mul(x, at(i)));
  }

  template <class Mode>
  static Vec finish(Vec v, Mode) {
    return v;
  }

  static bool failed(Vec, Vec) { return false; }

 private:
  alignas(64) float values_[kCapacity];
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

// What the two types below have in common: factors, times a power of two, and times 2^k + 1.
template <int64_t kCapacity>
class SplitFactors {
 public:
  float* values() { return values_; }
  Vec at(int64_t i) const { return Lanes<float>::load(values_ + i, Full{}); }
  static bool failed(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }

 protected:
  void split(int64_t n, Vec scale, Vec factor) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec scaled = mul(at(i), scale);
      Lanes<float>::store(scaled_ + i, scaled, Full{});
      Lanes<float>::store(split_ + i, mul(scaled, factor), Full{});
    }
  }

  alignas(64) float values_[kCapacity];
  alignas(64) float scaled_[kCapacity];
  alignas(64) float split_[kCapacity];
};

// float16 ends at 65504. Times 2^100, s is infinite, and the product NaN, from 32768 on. And below
// 2^-13 float16 has a fixed step, 2^-24, which 0.75 instead of s rounds to.
template <int64_t kCapacity>
class Factors<Float16, kCapacity> : public SplitFactors<kCapacity> {
 public:
  void ready(int64_t n) { this->split(n, splat(0x1p100f), splat(0x1.0008p13f)); }

  Vec product(Vec x, int64_t i, Exact) const {
    return Lanes<Float16>::round(mul(x, this->at(i)));
  }

  Vec product(Vec x, int64_t i, Quick) const {
    const Vec whole = mul(x, Lanes<float>::load(this->split_ + i, Full{}));
    // The larger magnitude, with the sign of the first one.
    const Vec s = _mm512_range_ps(whole, splat(0x1.8p99f), 0x3);
    return add(s, _mm512_fmsub_ps(x, Lanes<float>::load(this->scaled_ + i, Full{}), s));
  }

  static Vec finish(Vec v, Exact) { return v; }
  static Vec finish(Vec v, Quick) { return mul(v, splat(0x1p-100f)); }
};

#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)

template <int64_t kCapacity>
class Factors<BFloat16, kCapacity> {
 public:
  float* values() { return values_; }
  void ready(int64_t) {}

  Vec at(int64_t i) const { return Lanes<float>::load(values_ + i, Full{}); }

  Vec product(Vec x, int64_t i, Exact) const { return Lanes<BFloat16>::round(mul(x, at(i))); }
  Vec product(Vec x, int64_t i, Quick) const {
    return rounded_and_shrunk(mul(x, at(i)), BFloat16{});
  }

  static Vec finish(Vec v, Exact) { return v; }
  static Vec finish(Vec v, Quick) { return mul(v, splat(0x1p16f)); }

  static bool failed(Vec a, Vec b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
  }

 private:
  alignas(64) float values_[kCapacity];
};

#endif

#if defined(__AVX512BF16__)

// bfloat16 is split up to 5e33. Below 1.2e-38, where results become zero, products have 8 bits all
// the same.
template <int64_t kCapacity>
class Factors<BFloat16, kCapacity> : public SplitFactors<kCapacity> {
 public:
  void ready(int64_t n) { this->split(n, splat(1), splat(0x1.0001p16f)); }

  Vec product(Vec x, int64_t i, Exact) const {
    return Lanes<BFloat16>::round(mul(x, this->at(i)));
  }

  Vec product(Vec x, int64_t i, Quick) const {
    const Vec s = mul(x, Lanes<float>::load(this->split_ + i, Full{}));
    return add(s, _mm512_fmsub_ps(x, Lanes<float>::load(this->scaled_ + i, Full{}), s));
  }

  template <class Mode>
  static Vec finish(Vec v, Mode) {
    return v;
  }
};

#endif

}  // namespace
