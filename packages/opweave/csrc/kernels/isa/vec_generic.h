// 4 float32 lanes in the vector types of GCC and Clang: correct on any CPU, with 16-bit conversions
// in integer arithmetic.
#pragma once

namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef uint16_t HalfBits __attribute__((vector_size(8)));
constexpr int64_t kLanes = 4;

inline Vec splat(float value) { return Vec{value, value, value, value}; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // rounds twice without hardware FMA
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline Bits bits_of(Vec v) { return reinterpret_cast<Bits>(v); }
inline Vec as_float(Bits bits) { return reinterpret_cast<Vec>(bits); }
inline Bits splat_bits(uint32_t value) { return Bits{value, value, value, value}; }

// Return condition ? a : b per lane, where condition is all ones or all zeros.
inline Bits choose(Bits condition, Bits a, Bits b) { return (condition & a) | (~condition & b); }

inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Bits less(Vec a, Vec b) { return reinterpret_cast<Bits>(a < b); }
inline Bits at_most(Vec a, Vec b) { return reinterpret_cast<Bits>(a <= b); }
inline Vec select(Bits condition, Vec a, Vec b) {
  return as_float(choose(condition, bits_of(a), bits_of(b)));
}
inline Vec min(Vec a, Vec b) { return select(less(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }
inline Vec negative_abs(Vec a) { return as_float(bits_of(a) | splat_bits(0x80000000)); }
inline Vec with_sign(Vec a, Vec b) {
  return as_float(choose(splat_bits(0x80000000), bits_of(b), bits_of(a)));
}
inline Vec ratio(Vec a, Vec b) { return div(a, b); }

// In two steps, because 2^n may not be a normal number.
inline Vec scale_by_power(Vec a, Vec n) {
  // Adding 1.5 * 2^23 rounds to an integer in the low bits; an offset of 256 keeps it positive.
  const Bits whole = bits_of(n + splat(0x1.8p23f)) - splat_bits(0x4b400000 - 256);
  const Bits half = whole >> 1;
  const auto power = [](Bits exponent) {
    return as_float((exponent - splat_bits(128 - 127)) << 23);
  };
  return a * power(half) * power(whole - half);
}

inline Vec power_of_bits(Vec v) { return as_float(bits_of(v) << 23); }

inline Vec keep(Vec v, Full) { return v; }
inline Vec keep(Vec v, Tail tail) {
  const Bits count = splat_bits(static_cast<uint32_t>(tail.count));
  const Bits condition = reinterpret_cast<Bits>(Bits{0, 1, 2, 3} < count);
  return as_float(condition & bits_of(v));
}

inline Vec widen(Bits half, BFloat16) { return as_float(half << 16); }

inline Vec widen(Bits half, Float16) {
  const Bits magnitude = half & splat_bits(0x7fff);
  const Bits sign = (half & splat_bits(0x8000)) << 16;
  // Move the fields into place, then correct the exponent bias with an exact product: 2^(127 - 15).
  const Bits scaled = bits_of(as_float(magnitude << 13) * splat(0x1p112f));
  const Bits special = reinterpret_cast<Bits>(magnitude >= splat_bits(0x7c00));
  const Bits infinite_or_nan = (magnitude << 13) | splat_bits(0x7f800000);
  return as_float(choose(special, infinite_or_nan, scaled) | sign);
}

inline Bits narrow(Vec v, BFloat16) {
  const Bits bits = bits_of(v);
  const Bits rounded = bits + ((bits >> 16) & splat_bits(1)) + splat_bits(0x7fff);
  const Bits is_nan = reinterpret_cast<Bits>(v != v);
  return choose(is_nan, splat_bits(0x7fc00000), rounded) >> 16;
}

inline Bits narrow(Vec v, Float16) {
  const Bits bits = bits_of(v);
  const Bits sign = (bits >> 16) & splat_bits(0x8000);
  const Bits magnitude = bits & splat_bits(0x7fffffff);
  // A carry out of the mantissa correctly turns 65520 and above into infinity.
  const Bits odd = (magnitude >> 13) & splat_bits(1);
  const Bits normal = (magnitude + odd + splat_bits(0xfff - (112u << 23))) >> 13;
  // Below 2^-14, adding 0.5 makes the hardware round to float16's denormal step, 2^-24.
  const Bits shifted = bits_of(as_float(magnitude) + splat(0.5f));
  const Bits denormal = shifted - splat_bits(0x3f000000);
  const Bits is_denormal = reinterpret_cast<Bits>(magnitude < splat_bits(113u << 23));
  const Bits overflows = reinterpret_cast<Bits>(magnitude >= splat_bits(143u << 23));
  const Bits is_nan = reinterpret_cast<Bits>(v != v);
  const Bits finite = choose(is_denormal, denormal, normal);
  const Bits infinite_or_nan = choose(is_nan, splat_bits(0x7e00), splat_bits(0x7c00));
  return choose(overflows, infinite_or_nan, finite) | sign;
}

// Rounds by computing 2^16 v - (2^16 v - v); the inner difference rounds to the target precision.
inline Vec round_moderate_to(Vec v, BFloat16) {
  const Vec scaled = v * splat(0x1p16f);
  return scaled - (scaled - v);
}
inline Vec round_moderate_to(Vec v, Float16) { return widen(narrow(v, Float16{}), Float16{}); }

template <class T>
struct Lanes {  // a 16-bit storage type
  static Vec load(const T* p, Full) {
    HalfBits half;
    memcpy(&half, p, sizeof(half));
    return widen(__builtin_convertvector(half, Bits), T{});
  }
  static Vec load(const T* p, Tail tail) {
    T buffer[kLanes] = {};
    memcpy(buffer, p, static_cast<size_t>(tail.count) * sizeof(T));
    return load(buffer, Full{});
  }
  static void store(T* p, Vec v, Full) {
    const HalfBits half = __builtin_convertvector(narrow(v, T{}), HalfBits);
    memcpy(p, &half, sizeof(half));
  }
  static void store(T* p, Vec v, Tail tail) {
    T buffer[kLanes];
    store(buffer, v, Full{});
    memcpy(p, buffer, static_cast<size_t>(tail.count) * sizeof(T));
  }
  static Vec round(Vec v) { return widen(narrow(v, T{}), T{}); }
  static Vec round_any(Vec v) { return round(v); }
  static Vec round_inexact(Vec v) { return round(v); }
  static Vec round_moderate(Vec v) { return round_moderate_to(v, T{}); }
  static Vec stored(Vec v) { return round(v); }
};

template <>
struct Lanes<float> {
  static Vec load(const float* p, Full) {
    Vec v;
    memcpy(&v, p, sizeof(v));
    return v;
  }
  static Vec load(const float* p, Tail tail) {
    Vec v = {};
    memcpy(&v, p, static_cast<size_t>(tail.count) * sizeof(float));
    return v;
  }
  static void store(float* p, Vec v, Full) { memcpy(p, &v, sizeof(v)); }
  static void store(float* p, Vec v, Tail tail) {
    memcpy(p, &v, static_cast<size_t>(tail.count) * sizeof(float));
  }
  static Vec round(Vec v) { return v; }
  static Vec round_any(Vec v) { return v; }
  static Vec round_inexact(Vec v) { return v; }
  static Vec round_moderate(Vec v) { return v; }
  static Vec stored(Vec v) { return v; }
};

constexpr int kSumOrder[kLanes] = {0, 2, 1, 3};

inline Vec sums(const Vec (&v)[kLanes]) {
  return Vec{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])};
}

inline void store_sums(float* to, const Vec (&v)[4]) {
  for (int k = 0; k < 4; ++k) to[k] = sum(v[k]);
}

inline float largest(Vec v) {
  const float a = v[0] > v[1] ? v[0] : v[1];
  const float b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

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
