// The blocks of GGUF files, in units of 32 columns in order:
//   Format::kUnits       units per block
//   Format::kBytes       bytes per block
//   Format::kScales      scales per unit: of 32 columns or of 16
//   Format::kHasOffsets  whether the weights are q * scale + offset; otherwise q * scale
//   Format::load         the scales and offsets of all units
//   Format::unit<u>      the q of a unit, as int16
#pragma once

#include "kernels/gguf.h"
#include "kernels/vec_bytes.h"
#include "kernels/vec_words.h"

namespace {

constexpr int kUnit32 = 32;                                 // columns per unit
constexpr int kVectors = kUnit32 / static_cast<int>(2 * kLanes);  // per unit

using Unit = Words[kVectors];

template <int N>
struct Index {
  static constexpr int value = N;
};

// Call visit(Index<i>) for i from I to N - 1.
template <int N, int I = 0, class Visit>
OPWEAVE_INLINE void each_index(const Visit& visit) {
  if constexpr (I < N) {
    visit(Index<I>{});
    each_index<N, I + 1>(visit);
  }
}

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof(bits));
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return widen(splat_bits(bits), Float16{})[0];
#endif
}

// The factors of a block: up to 16 scales, or 8 scales and 8 offsets.
struct alignas(64) Factors {
  float of[16];
};

OPWEAVE_INLINE void load_unit(Unit& to, const uint8_t* from) {
  OPWEAVE_UNROLL for (int v = 0; v < kVectors; ++v) to[v] = load_u8(from + 2 * kLanes * v);
}

template <class Change>
OPWEAVE_INLINE void change_unit(Unit& unit, const Change& change) {
  OPWEAVE_UNROLL for (int v = 0; v < kVectors; ++v) unit[v] = change(unit[v], v);
}

// Keep the low or the high four bits of bytes.
template <bool kHigh>
OPWEAVE_INLINE void keep_nibbles(Unit& unit) {
  change_unit(unit, [](Words w, int) { return kHigh ? shifted_right<4>(w) : masked(w, 15); });
}

// Shift to the left, or to the right if kLeft is negative.
template <int kLeft>
OPWEAVE_INLINE Words moved(Words w) {
  if constexpr (kLeft >= 0) {
    return shifted_left<kLeft>(w);
  } else {
    return shifted_right<-kLeft>(w);
  }
}

struct Q8_0 {
  static constexpr int kUnits = 1, kBytes = 34, kScales = 1;
  static constexpr bool kHasOffsets = false;

  OPWEAVE_INLINE static void load(Factors& to, const uint8_t* block) { to.of[0] = half_at(block); }
  template <int U>
  OPWEAVE_INLINE static void unit(Unit& to, const uint8_t* block) {
    OPWEAVE_UNROLL for (int v = 0; v < kVectors; ++v) to[v] = load_s8(block + 2 + 2 * kLanes * v);
  }
};

struct Q4_0 {
  static constexpr int kUnits = 1, kBytes = 18, kScales = 1;
  static constexpr bool kHasOffsets = false;

  OPWEAVE_INLINE static void load(Factors& to, const uint8_t* block) { to.of[0] = half_at(block); }
  template <int U>
  OPWEAVE_INLINE static void unit(Unit& to, const uint8_t* block) {
    load_nibbles(to, block + 2);
    change_unit(to, [](Words w, int) { return minus(w, 8); });
  }
};

struct Q4_1 {
  static constexpr int kUnits = 1, kBytes = 20, kScales = 1;
  static constexpr bool kHasOffsets = true;

  OPWEAVE_INLINE static void load(Factors& to, const uint8_t* block) {
    to.of[0] = half_at(block);
    to.of[8] = half_at(block + 2);
  }
  template <int U>
  OPWEAVE_INLINE static void unit(Unit& to, const uint8_t* block) {
    load_nibbles(to, block + 4);
  }
};

// q4_k and q5_k: eight scales and eight minima of six bits, in 12 bytes.
struct SixBits {
  static constexpr int kUnits = 8, kScales = 1;
  static constexpr bool kHasOffsets = true;

  OPWEAVE_INLINE static void load(Factors& to, const uint8_t* block) {
    uint32_t packed[3];
    memcpy(packed, block + 4, sizeof(packed));
    const uint32_t small[4] = {
        packed[0] & 0x3f3f3f3f,
        (packed[2] & 0x0f0f0f0f) | ((packed[0] >> 2) & 0x30303030),
        packed[1] & 0x3f3f3f3f,
        ((packed[2] >> 4) & 0x0f0f0f0f) | ((packed[1] >> 2) & 0x30303030),
    };
    int8_t bytes[16];
    memcpy(bytes, small, sizeof(bytes));
    const float scale = half_at(block);
    const float least = -half_at(block + 2);
    for (int i = 0; i < 16; i += kLanes) {
      Vec factor = splat(i < 8 ? scale : least);
      if constexpr (kLanes == 16) {
        factor = add(keep(factor, Tail{8}), sub(splat(least), keep(splat(least), Tail{8})));
      }
      Lanes<float>::store(to.of + i, mul(Lanes<int8_t>::load(bytes + i, Full{}), factor), Full{});
    }
  }
};

struct Q4_K : SixBits {
  static constexpr int kBytes = 144;

  template <int U>
  OPWEAVE_INLINE static void unit(Unit& to, const uint8_t* block) {
    load_unit(to, block + 16 + U / 2 * kUnit32);
    keep_nibbles<U % 2 != 0>(to);
  }
};

struct Q5_K : SixBits {
  static constexpr int kBytes = 176;

  template <int U>
  OPWEAVE_INLINE static void unit(Unit& to, const uint8_t* block) {
    Unit high;
    load_unit(high, block + 16);
    load_unit(to, block + 48 + U / 2 * kUnit32);
    keep_nibbles<U % 2 != 0>(to);
    change_unit(to, [&](Words w, int v) {
      return joined_words(w, masked(moved<4 - U>(high[v]), 16));
    });
  }
};

struct Q6_K {
  static constexpr int kUnits = 8, kBytes = 210, kScales = 2;
  static constexpr bool kHasOffsets = false;

  OPWEAVE_INLINE static void load(Factors& to, const uint8_t* block) {
    int8_t bytes[16];
    memcpy(bytes, block + 192, sizeof(bytes));
    const Vec scale = splat(half_at(block + 208));
    for (int i = 0; i < 16; i += kLanes) {
      Lanes<float>::store(to.of + i, mul(Lanes<int8_t>::load(bytes + i, Full{}), scale), Full{});
    }
  }
  template <int U>
  OPWEAVE_INLINE static void unit(Unit& to, const uint8_t* block) {
    constexpr int kHalf = U / 4;
    Unit high;
    load_unit(high, block + 128 + kHalf * kUnit32);
    load_unit(to, block + kHalf * 64 + U % 2 * kUnit32);
    keep_nibbles<(U % 4 > 1)>(to);
    change_unit(to, [&](Words w, int v) {
      return minus(joined_words(w, masked(moved<4 - 2 * (U % 4)>(high[v]), 48)), 32);
    });
  }
};

// Call visit with the format.
template <class Visit>
inline void with_format(OpweaveGgufFormat format, Visit visit) {
  switch (format) {
    case OPWEAVE_Q8_0: return visit(Q8_0{});
    case OPWEAVE_Q4_0: return visit(Q4_0{});
    case OPWEAVE_Q4_1: return visit(Q4_1{});
    case OPWEAVE_Q4_K: return visit(Q4_K{});
    case OPWEAVE_Q5_K: return visit(Q5_K{});
    case OPWEAVE_Q6_K: return visit(Q6_K{});
    default: return;  // callers check the format
  }
}

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/gguf_widen_avx512.h"
#endif

namespace {

#if !defined(OPWEAVE_WIDENS_UNITS)

// Write the weights of a unit, rounded as the definition rounds. `offset` is null without one.
template <class F, class T>
inline void widen_unit(T* to, const Unit& unit, const float* scales, const float* offset) {
  alignas(64) int16_t numbers[kUnit32];
  alignas(64) float weights[kUnit32];
  memcpy(numbers, unit, sizeof(numbers));
  for (int i = 0; i < kUnit32; ++i) {
    const float product = static_cast<float>(numbers[i]) * scales[i * F::kScales / kUnit32];
    weights[i] = F::kHasOffsets ? product + *offset : product;
  }
  for_each_vec(kUnit32, [=](int64_t i, auto part) {
    Lanes<T>::store(to + i, Lanes<float>::load(weights + i, part), part);
  });
}

#endif

// Write the weights of a block.
template <class F, class T>
inline void widen_block(T* to, const uint8_t* block) {
  Factors factors;
  F::load(factors, block);
  each_index<F::kUnits>([&](auto u) {
    constexpr int kU = decltype(u)::value;
    Unit unit;
    F::template unit<kU>(unit, block);
    const float* offset = F::kHasOffsets ? factors.of + 8 + kU : nullptr;
    widen_unit<F>(to + kU * kUnit32, unit, factors.of + kU * F::kScales, offset);
  });
}

}  // namespace
