// The products of a dot product, summed lane by lane:
//   Dot<K>::Query       what the other operand of values of type K is kept as
//   Dot<K>::kWidth      how many elements a step takes
//   Dot<K>::keep        stores n values of type K as Query, zeros up to a whole step
//   Dot<K>::query, key  load a step of either operand; of keys also a Tail
//   Dot<K>::step        adds the products of a step to the totals
#pragma once

#include "kernels/vec.h"

namespace {

template <class K>
struct Dot {
  using Query = float;
  static constexpr int64_t kWidth = kLanes;

  static void keep(Query* out, const K* values, int64_t n) {
    for_each_vec(n, [=](int64_t i, auto part) {
      Lanes<float>::store(out + i, Lanes<K>::load(values + i, part), Full{});
    });
  }
  static Vec query(const Query* p) { return Lanes<float>::load(p, Full{}); }
  template <class Part>
  static Vec key(const K* p, Part part) {
    return Lanes<K>::load(p, part);
  }
  static Vec step(Vec query, Vec key, Vec totals) { return fma(query, key, totals); }
};

#if defined(__AVX512BF16__)
// Both operands stay as they are; denormals count as zero.
template <>
struct Dot<BFloat16> {
  using Query = BFloat16;
  static constexpr int64_t kWidth = 2 * kLanes;

  static void keep(Query* out, const BFloat16* values, int64_t n) {
    const size_t bytes = static_cast<size_t>(n) * sizeof(BFloat16);
    const size_t whole = static_cast<size_t>((n + kWidth - 1) / kWidth * kWidth) * sizeof(BFloat16);
    memcpy(out, values, bytes);
    memset(reinterpret_cast<char*>(out) + bytes, 0, whole - bytes);
  }
  static __m512bh query(const Query* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh key(const BFloat16* p, Full) { return (__m512bh)_mm512_loadu_si512(p); }
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
