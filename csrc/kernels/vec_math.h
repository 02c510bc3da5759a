// Elementary functions of a vector, each one polynomial without branches.
//
// Largest errors over all arguments that are named, in units in the last place of the exact result;
// tests/native/test_vec_math.py measures them.
//
//   exp      1.1    0 and infinity where float32 ends; denormal results too
//   exp_of_negative  1.1  of x <= 0; 0 where float32 has denormals only
//   expm1    1.7    of x <= 88.7; loses the sign of -0
//   sigmoid  2.7    denormal results too
//   tanh     2.6    odd
//   erf      2.5    odd
//
// For results that are rounded to 16 bits, in fewer steps (errors relative to the result):
//
//   rough_exp2     2^-17  of |x| <= 32; above, 2^-22 * |x|
//   rough_sigmoid  2^-17  of |x| <= 22; above, 2^-22 * 1.45 |x|
//   rough_tanh     2^-19, absolute: near zero it has few digits, for 1 + tanh enough
//   rough_normal   2^-16  of |x| <= 4: the distribution function of the normal distribution
//
// NaN gives NaN. The polynomials are minimax fits: exp's is within 2^-28 of the
// function, that of ln(1 - erf) so near that erf is within 2^-27, the rough ones within 2^-18.
#pragma once

#include "kernels/vec.h"

namespace {

// c0 + x * (c1 + x * (...))
inline Vec polynomial(Vec, float c0) { return splat(c0); }

template <class... Rest>
inline Vec polynomial(Vec x, float c0, Rest... rest) {
  return fma(polynomial(x, rest...), x, splat(c0));
}

// exp(x) = 2^n * (1 + m), with |x - n * ln(2)| <= ln(2) / 2, for |x| < 2^22.
struct Exponential {
  explicit Exponential(Vec x, float bias = 0) {
    const Vec magic = splat(0x1.8p23f + bias);  // adding 1.5 * 2^23 rounds to an integer
    n_and_bias = fma(x, splat(1.44269504f), magic);
    n = sub(n_and_bias, magic);
    // ln(2) in two parts, the first with so few bits that its product with n is exact.
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    const Vec q = polynomial(r, 4.9999994e-01f, 1.666652e-01f, 4.1668408e-02f, 8.3689215e-03f,
                             1.3814175e-03f);
    m = fma(mul(q, r), r, r);
  }

  Vec n_and_bias;  // as an integer in the low bits
  Vec n;
  Vec m;
};

// exp(x) for -104 <= x <= 89.
inline Vec exp_in_range(Vec x) {
  const Exponential e(x);
  return scale_by_power(add(e.m, splat(1)), e.n);
}

inline Vec exp(Vec x) { return exp_in_range(min(splat(89), max(splat(-104), x))); }

// With 127 more, n is the exponent of 2^n; from -127 down, 2^n is zero.
inline Vec exp_of_negative(Vec x) {
  const Exponential e(max(splat(-88), x), 127);
  const Vec power = power_of_bits(e.n_and_bias);
  return fma(e.m, power, power);
}

inline Vec expm1(Vec x) {
  const Exponential e(min(splat(88.7f), max(splat(-30), x)));
  const Vec half = scale_by_power(splat(0.5f), e.n);  // 2^n may exceed float32 where exp does not
  const Vec halved = fma(half, e.m, sub(half, splat(0.5f)));
  return add(halved, halved);
}

inline Vec sigmoid(Vec x) {
  // From exp(-|x|), which cannot overflow, so that every step is finite.
  const Vec e = exp_in_range(max(splat(-104), negative_abs(x)));
  const Vec numerator = select(less(x, splat(0)), e, splat(1));
  return ratio(numerator, add(e, splat(1)));
}

// exp(x) and a constant, -1 or 1, of x <= 0.
struct ExponentialOfNegative {
  explicit ExponentialOfNegative(Vec x)
      : e(max(splat(-30), x), 127), power(power_of_bits(e.n_and_bias)) {}
  Vec plus(float one) const { return fma(e.m, power, add(power, splat(one))); }

  Exponential e;
  Vec power;
};

inline Vec tanh(Vec x) {
  const Vec negative = negative_abs(x);
  const ExponentialOfNegative e(add(negative, negative));
  return with_sign(ratio(e.plus(-1), e.plus(1)), x);
}

inline Vec erf(Vec x) {
  // ln(1 - erf) is smooth, its first coefficient in two parts; at 4, erf rounds to 1.
  const Vec t = min(splat(4), sub(splat(0), negative_abs(x)));
  const Vec p =
      polynomial(t, 5.41e-8f, -6.3661938e-01f, -1.0277783e-01f, 1.9153064e-02f, 1.6039576e-04f,
                 -1.6670270e-03f, 6.3283655e-04f, -1.1764117e-04f, 9.2562523e-06f);
  const ExponentialOfNegative e(fma(t, splat(-1.12837923f), mul(p, t)));
  return with_sign(e.plus(-1), x);
}

inline Vec rough_exp2(Vec x) {
  const Exponent e(x);
  constexpr auto& c = Exponent::kPolynomial;
  return e.raise(polynomial(e.fraction, c[0], c[1], c[2], c[3], c[4]));
}

// a * sigmoid(factor * x), as exact as rough_sigmoid.
inline Vec rough_gated(Vec a, Vec x, float factor) {
  return ratio(a, add(rough_exp2(mul(x, splat(-1.44269504f * factor))), splat(1)));
}

inline Vec rough_sigmoid(Vec x) { return rough_gated(splat(1), x, 1); }

inline Vec rough_tanh(Vec x) {
  return sub(rough_gated(splat(2), x, 2), splat(1));
}

inline Vec rough_normal(Vec x) {
  // The logarithm of the lower tail is smooth; beyond the fit it falls to minus infinity.
  const Vec log = polynomial(negative_abs(x), -9.999958e-01f, 1.1512374e+00f, -4.5851728e-01f,
                             5.3886298e-02f, 8.4604565e-03f, 9.1528567e-04f, 5.9225848e-05f,
                             1.69259e-06f);
  const Vec tail = rough_exp2(log);
  return select(less(x, splat(0)), tail, sub(splat(1), tail));
}

// The functions to use for results that are rounded to T.
template <class T>
struct MathFor {
  static Vec sigmoid(Vec x) { return rough_sigmoid(x); }
  static Vec gated(Vec a, Vec x, float factor) { return rough_gated(a, x, factor); }
  static Vec tanh(Vec x) { return rough_tanh(x); }
  static Vec normal(Vec x) { return rough_normal(x); }
};

template <>
struct MathFor<float> {
  static Vec sigmoid(Vec x) { return ::sigmoid(x); }
  static Vec gated(Vec a, Vec x, float factor) { return mul(a, sigmoid(mul(x, splat(factor)))); }
  static Vec tanh(Vec x) { return ::tanh(x); }
  static Vec normal(Vec x) {
    return mul(splat(0.5f), add(erf(mul(x, splat(0.70710678f))), splat(1)));
  }
};

// Whether a function is found approximately, so that its results are no ties but by chance.
template <class Function>
constexpr bool kIsApproximate = false;

// x * sigmoid(x), for results that are rounded to T.
template <class T>
struct Silu {
  Silu() = default;
  template <class Call>
  explicit Silu(const Call&) {}  // it has no parameters

  Vec operator()(Vec x) const { return MathFor<T>::gated(x, x, 1); }
};

template <class T>
constexpr bool kIsApproximate<Silu<T>> = true;

}  // namespace
