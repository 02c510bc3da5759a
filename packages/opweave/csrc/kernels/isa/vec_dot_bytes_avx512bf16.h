// 8-bit weights times bfloat16: a table converts each weight to bfloat16, which is exact, so that
// bfloat16 pairs can be multiplied.
#pragma once

#include "kernels/vec_dot.h"
#include "kernels/vec_group.h"

namespace {

// Return the bits of magnitude * 2^exponent, for an 8-bit magnitude.
constexpr uint16_t bfloat16_bits(int magnitude, int exponent) {
  if (magnitude == 0) return 0;
  int top = 7;
  while ((magnitude >> top) == 0) --top;
  return static_cast<uint16_t>(((top + exponent + 127) << 7) | ((magnitude << (7 - top)) & 0x7f));
}

// The lower and upper bytes of the bfloat16 values of 128 codes.
struct CodeTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];

  template <class Bits>
  constexpr explicit CodeTable(Bits bits) : low{}, high{} {
    for (int code = 0; code < 128; ++code) {
      low[code] = static_cast<uint8_t>(bits(code) & 0xff);
      high[code] = static_cast<uint8_t>(bits(code) >> 8);
    }
  }
};

constexpr uint16_t float8_bits(int code) {
  if (code == 0x7f) return 0x7fc0;  // NaN
  const int exponent = code >> 3;
  return exponent == 0 ? bfloat16_bits(code & 7, -9)
                       : bfloat16_bits(8 + (code & 7), exponent - 10);
}

constexpr CodeTable kFloat8Codes(float8_bits);
constexpr CodeTable kMagnitudes([](int code) { return bfloat16_bits(code, 0); });

// Look up the lower seven bits of each byte.
inline __m512i look_up(const uint8_t (&table)[128], __m512i bytes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes,
                                  _mm512_load_si512(table + 64));
}

// The lower and upper bytes of the converted weights.
struct TwoBytes {
  __m512i low;
  __m512i high;
};

inline TwoBytes split_codes(__m512i codes, Float8) {
  return {look_up(kFloat8Codes.low, codes), with_signs(look_up(kFloat8Codes.high, codes), codes)};
}

inline TwoBytes split_codes(__m512i codes, int8_t) {
  const __m512i magnitudes = _mm512_abs_epi8(codes);
  // The table lacks 128, which needs eight bits. Its lower byte is that of zero; set the upper one.
  const __m512i high = _mm512_mask_mov_epi8(look_up(kMagnitudes.high, magnitudes),
                                            _mm512_movepi8_mask(magnitudes),
                                            _mm512_set1_epi8(bfloat16_bits(128, 0) >> 8));
  return {look_up(kMagnitudes.low, magnitudes), with_signs(high, codes)};
}

struct BFloat16x64 {
  __m512bh first;
  __m512bh second;
};

template <class W>
struct DotOfBytes {
  using Weight = W;
  using Query = BFloat16;
  static constexpr int64_t kWidth = 4 * kLanes;
  static constexpr float kUnit = 1;

  static void keep(Query* to, const BFloat16* from, int64_t n) { copy_padded(to, from, n, kWidth); }
  static void widen(Query* to, const W* from, int64_t n) {
    for (int64_t i = 0; i < n; i += kWidth) {
      const BFloat16x64 wide = i + kWidth <= n ? key(from + i, Full{}) : key(from + i, Tail{n - i});
      _mm512_storeu_si512(to + i, (__m512i)wide.first);
      _mm512_storeu_si512(to + i + kWidth / 2, (__m512i)wide.second);
    }
  }
  static BFloat16x64 query(const Query* p) {
    return {load_bfloat16(p), load_bfloat16(p + kWidth / 2)};
  }
  static BFloat16x64 key(const W* p, Full) { return widened(_mm512_loadu_si512(p)); }
  static BFloat16x64 key(const W* p, Tail tail) {
    touch(p, tail);
    const __mmask64 mask = (uint64_t{1} << tail.count) - 1u;
    return widened(_mm512_maskz_loadu_epi8(mask, p));
  }
  static Vec step(const BFloat16x64& query, const BFloat16x64& key, Vec totals) {
    totals = _mm512_dpbf16_ps(totals, query.first, key.first);
    return _mm512_dpbf16_ps(totals, query.second, key.second);
  }

 private:
  static BFloat16x64 widened(__m512i codes) {
    // Unpacking works within each quarter of the vector, so distribute the codes over the quarters
    // first.
    const __m512i dealt =
        _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
    const TwoBytes bytes = split_codes(dealt, W{});
    return {(__m512bh)_mm512_unpacklo_epi8(bytes.low, bytes.high),
            (__m512bh)_mm512_unpackhi_epi8(bytes.low, bytes.high)};
  }
};

template <>
struct Dot<int8_t, BFloat16> : DotOfBytes<int8_t> {};
template <>
struct Dot<Float8, BFloat16> : DotOfBytes<Float8> {};

// Multiplies in float32, with the converted bfloat16 as the upper half: the even elements of 32,
// then the odd ones. A partial step keeps its order.
template <class X>
struct DotOfCodes {
  using Weight = Float8;
  using Query = float;
  static constexpr int64_t kWidth = 4 * kLanes;
  static constexpr float kUnit = 1;

  struct Four {
    Vec v[4];
  };

  static void keep(Query* to, const X* from, int64_t n) {
    const int64_t whole = n / kWidth * kWidth;
    if (whole < n) memset(to + whole, 0, kWidth * sizeof(Query));
    widen_row(to, from, n);
    order_groups<BFloat16>(to, whole);
  }
  static void widen(Query* to, const Float8* from, int64_t n) {
    for (int64_t i = 0; i < n; i += kWidth) {
      const Four wide = i + kWidth <= n ? key(from + i, Full{}) : key(from + i, Tail{n - i});
      for (int k = 0; k < 4; ++k) Lanes<float>::store(to + i + k * kLanes, wide.v[k], Full{});
    }
  }
  static Four query(const Query* p) {
    Four four;
    for (int k = 0; k < 4; ++k) four.v[k] = Lanes<float>::load(p + k * kLanes, Full{});
    return four;
  }
  static Four key(const Float8* p, Full part) {
    const BFloat16x64 words = DotOfBytes<Float8>::key(p, part);
    const __m512i first = (__m512i)words.first;
    const __m512i second = (__m512i)words.second;
    return {{even_of(first, BFloat16{}), odd_of(first, BFloat16{}), even_of(second, BFloat16{}),
             odd_of(second, BFloat16{})}};
  }
  static Four key(const Float8* p, Tail tail) {
    const BFloat16x64 words = DotOfBytes<Float8>::key(p, tail);
    BFloat16 stored[kWidth];
    store_words(stored, (__m512i)words.first);
    store_words(stored + kWidth / 2, (__m512i)words.second);
    Four four;
    for (int k = 0; k < 4; ++k) four.v[k] = Lanes<BFloat16>::load(stored + k * kLanes, Full{});
    return four;
  }
  static Vec step(const Four& query, const Four& key, Vec totals) {
    for (int k = 0; k < 4; ++k) totals = fma(query.v[k], key.v[k], totals);
    return totals;
  }
};

template <>
struct FewDot<Float8, float> : DotOfCodes<float> {};
template <>
struct FewDot<Float8, Float16> : DotOfCodes<Float16> {};

#if defined(__AMX_BF16__)
// On CPUs with AMX, two float32 products are faster than one product of pairs.
template <>
struct FewDot<int8_t, BFloat16> : WideDot<int8_t, BFloat16> {};
#endif

}  // namespace
