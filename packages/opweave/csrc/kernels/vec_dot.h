// Dot products of keys or weights of type W with values of type X, accumulated per lane:
//   Dot<W, X>::Query       the packed type of values of type X
//   Dot<W, X>::kWidth      the number of elements per step
//   Dot<W, X>::kUnit       the unit of the sums
//   Dot<W, X>::keep        packs n values of type X as Query, padded with zeros to a whole step
//   Dot<W, X>::widen       packs values of type W, for multiplication with Dot<Query>
//   Dot<W, X>::query, key  load a step of either operand; keys also support a Tail
//   Dot<W, X>::step        adds the products of a step to the totals
#pragma once

#include "kernels/vec_bytes.h"

namespace {

template <class T>
inline void widen_row(float* to, const T* from, int64_t n) {
  for_each_vec(n, [=](int64_t i, auto part) {
    Lanes<float>::store(to + i, Lanes<T>::load(from + i, part), Full{});
  });
}

// In float32.
template <class W, class X>
struct WideDot {
  using Weight = W;
  using Query = float;
  static constexpr int64_t kWidth = kLanes;
  static constexpr float kUnit = ::kUnit<W>;

  static void keep(Query* to, const X* from, int64_t n) { widen_row(to, from, n); }
  static void widen(Query* to, const W* from, int64_t n) { widen_row(to, from, n); }
  static Vec query(const Query* p) { return Lanes<float>::load(p, Full{}); }
  template <class Part>
  static Vec key(const W* p, Part part) {
    return Lanes<W>::load(p, part);
  }
  static Vec step(Vec query, Vec key, Vec totals) { return fma(query, key, totals); }
};

template <class W, class X = W>
struct Dot : WideDot<W, X> {};

// Dot for one or a few tokens, where the time is spent on loading and widening the keys.
template <class W, class X>
struct FewDot : Dot<W, X> {};

#if defined(__AVX512BF16__)

// Copy n values, padded with zeros to a multiple of `width`.
inline void copy_padded(BFloat16* to, const BFloat16* from, int64_t n, int64_t width) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(BFloat16);
  const size_t whole = static_cast<size_t>((n + width - 1) / width * width) * sizeof(BFloat16);
  if (n > 0) memcpy(to, from, bytes);  // an empty row may be a null pointer
  memset(reinterpret_cast<char*>(to) + bytes, 0, whole - bytes);
}

inline __m512bh load_bfloat16(const BFloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// Multiplies bfloat16 pairs without widening; denormals count as zero.
template <>
struct Dot<BFloat16> {
  using Weight = BFloat16;
  using Query = BFloat16;
  static constexpr int64_t kWidth = 2 * kLanes;
  static constexpr float kUnit = 1;

  static void keep(Query* to, const BFloat16* from, int64_t n) { copy_padded(to, from, n, kWidth); }
  static __m512bh query(const Query* p) { return load_bfloat16(p); }
  static __m512bh key(const BFloat16* p, Full) { return load_bfloat16(p); }
  static __m512bh key(const BFloat16* p, Tail tail) {
    touch(p, tail);
    const auto mask = static_cast<__mmask32>((uint64_t{1} << tail.count) - 1u);
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
  }
  static Vec step(__m512bh query, __m512bh key, Vec totals) {
    return _mm512_dpbf16_ps(totals, query, key);
  }
};

#endif

}  // namespace

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include "kernels/isa/vec_dot_bytes_avx512bf16.h"
#endif
