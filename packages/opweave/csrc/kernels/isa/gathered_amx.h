// Look up results with gather instructions; see gathered.h.
#pragma once

#include "kernels/load_pairs.h"
#include "kernels/prefetch.h"

namespace {

constexpr bool kGathers = true;

// results[number.bits] is the result of a number. One element before the first and one after the
// last are read too.
template <class T>
struct Gathered {
  // Return the results of float32 lanes that are exactly bfloat16 or float16 numbers.
  Vec of(Vec x) const {
    return upper_half(ending_at(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
  }
  Halves of(Halves x) const { return _mm512_castsi512_ph(of_words(_mm512_castph_si512(x))); }
  template <class Part>
  Vec load(const T* x, Part part) const {
    return of(Lanes<T>::load(x, part));
  }
  // Return the results of the first element of every pair.
  template <class Part>
  auto load_first(const T* x, Part part) const {
    return of(load_pairs(x, part).first);
  }

  // Store the results of n numbers; out may be x. `next` is prefetched.
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

  // Gather 32 bits, of which the first or the last 16 are the result.
  __m512i beginning_at(__m512i numbers) const {
    return _mm512_i32gather_epi32(numbers, results, sizeof(T));
  }
  __m512i ending_at(__m512i numbers) const {
    return _mm512_i32gather_epi32(numbers, results - 1, sizeof(T));
  }
};

}  // namespace
