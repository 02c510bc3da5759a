// Exponent for instruction sets other than AVX-512, which has an instruction for it.
#pragma once

namespace {

// Adding 1.5 * 2^23 rounds to an integer in the low bits. With 126 more, it is the biased exponent
// of half the power.
struct Exponent {
  static constexpr float kPolynomial[] = {2 * 9.999993e-01f, 2 * 6.931218e-01f, 2 * 2.4024744e-01f,
                                          2 * 5.591786e-02f, 2 * 9.570102e-03f};

  explicit Exponent(Vec x) {
    const Vec magic = splat(0x1.8p23f + 126);
    const Vec bounded = min(splat(129), max(splat(-126), x));
    const Vec whole = add(bounded, magic);
    fraction = sub(bounded, sub(whole, magic));
    half_power = power_of_bits(whole);
  }
  Vec raise(Vec p) const { return mul(p, half_power); }

  Vec fraction;
  Vec half_power;
};

}  // namespace
