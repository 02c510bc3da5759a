// What a function gives for numbers of 16 bits, gathered from a table of its results.
//
// CPUs with AMX gather 16 numbers from their first-level cache in nine cycles: half as long as by
// loads one by one. The numbers that occur most fit there.
#pragma once

#include "kernels/load_pairs.h"
#include "kernels/prefetch.h"

namespace {

template <class T>
struct Gathered;

#if !defined(__AMX_BF16__)

constexpr bool kGathers = false;

#else

constexpr bool kGathers = true;

// results[number.bits] is the result of a number; the elements before the first and behind the last
// one are read, too.
template <class T>
struct Gathered {
  // Of numbers of bfloat16, or of float16.
  Vec of(Vec x) const {
    return upper_half(ending_at(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
  }
  Halves of(Halves x) const { return _mm512_castsi512_ph(of_words(_mm512_castph_si512(x))); }
  template <class Part>
  Vec load(const T* x, Part part) const {
    return of(Lanes<T>::load(x, part));
  }
  // Of the first of every pair of neighbours.
  template <class Part>
  auto load_first(const T* x, Part part) const {
    return of(load_pairs(x, part).first);
  }

  // Those of n numbers, as they are; out may be x. next is fetched.
  template <class Ahead>
  void copy(T* out, const T* x, int64_t n, Ahead next) const {
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
      next.fetch(i);
      store_words(out + i, of_words(load_words(x + i)));
    }
    for (; i < n; ++i) out[i] = results[x[i].bits];
  }

  const T* results;

 private:
  static constexpr int64_t kWide = 2 * kLanes;

  __m512i of_words(__m512i words) const {
    const __m512i even = _mm512_and_si512(words, _mm512_set1_epi32(0xffff));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, beginning_at(even),
                                   ending_at(_mm512_srli_epi32(words, 16)));
  }

  // 32 bits, the first or the last 16 of which are the result.
  __m512i beginning_at(__m512i numbers) const {
    return _mm512_i32gather_epi32(numbers, results, sizeof(T));
  }
  __m512i ending_at(__m512i numbers) const {
    return _mm512_i32gather_epi32(numbers, results - 1, sizeof(T));
  }
};

#endif

// Whether that takes less time than to compute an activation, too, which is multiplied afterwards:
// float16 is multiplied as it is.
template <class T>
constexpr bool kGathersFaster = false;
template <>
constexpr bool kGathersFaster<BFloat16> = kGathers;

}  // namespace
