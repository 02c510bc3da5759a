// Products of 16-bit integers in the vector types of GCC and Clang; see vec_words.h.
#pragma once

#include "kernels/vec.h"

namespace {

typedef int16_t Words __attribute__((vector_size(16)));
typedef int32_t Sums32 __attribute__((vector_size(16)));

template <class V, class T>
inline V load_vector(const T* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}

inline Words load_words16(const int16_t* p) { return load_vector<Words>(p); }
inline Sums32 load_sums(const int32_t* p) { return load_vector<Sums32>(p); }

inline Words load_packed(const uint8_t* p, Full) { return load_vector<Words>(p); }
inline Words load_packed(const uint8_t* p, Tail tail) {
  Words v = {};
  memcpy(&v, p, static_cast<size_t>(tail.count));
  return v;
}

template <int I>
inline Words nibbles(Words v) {
  return (v >> (4 * I)) & 15;
}

inline Sums32 add_products(Sums32 sums, Words a, Words b) {
  const Sums32 wide_a = reinterpret_cast<Sums32>(a);
  const Sums32 wide_b = reinterpret_cast<Sums32>(b);
  return sums + (wide_a << 16 >> 16) * (wide_b << 16 >> 16) + (wide_a >> 16) * (wide_b >> 16);
}

inline Vec to_float(Sums32 sums) { return __builtin_convertvector(sums, Vec); }

struct Spread {
  explicit Spread(const int32_t (&of_lane)[kLanes]) : places(load_vector<Sums32>(of_lane)) {}
  Vec spread(Vec v) const {
    return Vec{v[places[0]], v[places[1]], v[places[2]], v[places[3]]};
  }
  void advance(int32_t n) { places += n; }

  Sums32 places;
};

typedef uint8_t EightBytes __attribute__((vector_size(8)));
typedef int8_t EightSignedBytes __attribute__((vector_size(8)));
typedef uint16_t UnsignedWords __attribute__((vector_size(16)));

inline Words load_u8(const uint8_t* p) {
  return __builtin_convertvector(load_vector<EightBytes>(p), Words);
}
inline Words load_s8(const uint8_t* p) {
  return __builtin_convertvector(load_vector<EightSignedBytes>(p), Words);
}
template <int N>
inline Words shifted_left(Words v) {
  return reinterpret_cast<Words>(reinterpret_cast<UnsignedWords>(v) << N);
}
template <int N>
inline Words shifted_right(Words v) {
  return reinterpret_cast<Words>(reinterpret_cast<UnsignedWords>(v) >> N);
}
inline Words masked(Words v, int16_t mask) { return v & mask; }
inline Words joined_words(Words a, Words b) { return a | b; }
inline Words minus(Words v, int16_t n) { return v - n; }

inline void load_nibbles(Words (&to)[4], const uint8_t* p) {
  for (int i = 0; i < 2; ++i) {
    const Words bytes = load_u8(p + 8 * i);
    to[i] = masked(bytes, 15);
    to[2 + i] = shifted_right<4>(bytes);
  }
}

}  // namespace
