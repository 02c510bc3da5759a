// Elementary functions of a vector, as polynomials without branches.
//
// Maximum errors over the given range, in ulp of the exact result; tests/native/test_vec_math.py
// measures them.
//
//   exp      1.1    0 and infinity outside the range of float32; supports denormal results
//   exp_of_negative  1.1  for x <= 0; denormal results are 0
//   expm1    1.7    for x <= 88.7; loses the sign of -0
//   sigmoid  2.7    supports denormal results
//   tanh     2.6    odd
//   erf      2.5    odd
//
// Faster approximations for results that are rounded to 16 bits (relative errors):
//
//   rough_exp2     2^-17  for |x| <= 32; above, 2^-22 * |x|
//   rough_sigmoid  2^-17  for |x| <= 22; above, 2^-22 * 1.45 |x|
//   rough_tanh     2^-19, absolute: inaccurate near zero, but sufficient for 1 + tanh
//   rough_normal   2^-16  for |x| <= 4: the cumulative distribution function of the normal
//                         distribution
//
// NaN gives NaN. The polynomials are minimax fits: within 2^-28 for exp, 2^-27 of erf for
// ln(1 - erf), and 2^-18 for the rough functions.
#pragma once

#include "vec.h"

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
    // ln(2) in two parts; the first has few enough bits for an exact product with n.
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

// With a bias of 127, n is the exponent field of 2^n; for n <= -127, 2^n becomes zero.
inline Vec exp_of_negative(Vec x) {
  const Exponential e(max(splat(-88), x), 127);
  const Vec power = power_of_bits(e.n_and_bias);
  return fma(e.m, power, power);
}

inline Vec expm1(Vec x) {
  const Exponential e(min(splat(88.7f), max(splat(-30), x)));
  const Vec half = scale_by_power(splat(0.5f), e.n);  // 2^n may overflow even if exp does not
  const Vec halved = fma(half, e.m, sub(half, splat(0.5f)));
  return add(halved, halved);
}

inline Vec sigmoid(Vec x) {
  // Uses exp(-|x|), which cannot overflow.
  const Vec e = exp_in_range(max(splat(-104), negative_abs(x)));
  const Vec numerator = select(less(x, splat(0)), e, splat(1));
  return ratio(numerator, add(e, splat(1)));
}

// exp(x) plus a constant, -1 or 1, for x <= 0.
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
  // Fits ln(1 - erf), which is smooth; its first coefficient has two parts. At 4, erf rounds to 1.
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

// Return a * sigmoid(factor * x), with the accuracy of rough_sigmoid.
inline Vec rough_gated(Vec a, Vec x, float factor) {
  return ratio(a, add(rough_exp2(mul(x, splat(-1.44269504f * factor))), splat(1)));
}

inline Vec rough_sigmoid(Vec x) { return rough_gated(splat(1), x, 1); }

inline Vec rough_tanh(Vec x) {
  return sub(rough_gated(splat(2), x, 2), splat(1));
}

inline Vec rough_normal(Vec x) {
  // Fits the logarithm of the lower tail, which is smooth; outside the fitted range, the polynomial
  // decreases to minus infinity.
  const Vec log = polynomial(negative_abs(x), -9.999958e-01f, 1.1512374e+00f, -4.5851728e-01f,
                             5.3886298e-02f, 8.4604565e-03f, 9.1528567e-04f, 5.9225848e-05f,
                             1.69259e-06f);
  const Vec tail = rough_exp2(log);
  return select(less(x, splat(0)), tail, sub(splat(1), tail));
}

// The functions for results that are rounded to T.
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

// Whether a function is an approximation, so that exact ties do not matter in its results.
template <class Function>
constexpr bool kIsApproximate = false;

// x * sigmoid(x), for results that are rounded to T.
template <class T>
struct Silu {
  Silu() = default;
  template <class Call>
  explicit Silu(const Call&) {}  // no parameters

  Vec operator()(Vec x) const { return MathFor<T>::gated(x, x, 1); }
};

template <class T>
constexpr bool kIsApproximate<Silu<T>> = true;

}  // namespace
