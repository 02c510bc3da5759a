// The results of a function of one 16-bit number, either computed or, for large calls, looked up in
// a table.
//
// A table belongs to one call and is not kept, because the data of such a large call would evict it
// from the CPU caches anyway.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels/gathered.h"
#include "kernels/load_pairs.h"
#include "kernels/prefetch.h"
#include "kernels/tuning.h"
#include "kernels/vec_group.h"
#include "kernels/vec_math.h"

namespace {

typedef uint16_t Eight __attribute__((vector_size(16)));

// Uses the intrinsic, which GCC merges for Even and Odd, unlike an assignment.
template <int kPlace>
inline Eight with_word(Eight words, uint16_t word) {
#if defined(__x86_64__)
  return reinterpret_cast<Eight>(_mm_insert_epi16(reinterpret_cast<__m128i>(words), word, kPlace));
#else
  words[kPlace] = word;
  return words;
#endif
}

template <class T, class Function>
inline Vec rounded_result(Function function, Vec x) {
  const Vec result = function(x);
  return kIsApproximate<Function> ? Lanes<T>::round_inexact(result) : Lanes<T>::round(result);
}

// Computes the results of a function of one vector, rounded to T.
template <class T, class Function>
struct Computed {
  // Vectors in flight before the first is stored.
  static constexpr int kBegun = sizeof(T) == sizeof(uint16_t) ? Tuning::kInFlight : kAtOnce;

  Vec of(Vec x) const { return rounded_result<T>(function, x); }
  template <class Numbers>  // Halves
  Numbers of(Numbers x) const {
    return halves_of(function(first_of(x)), function(second_of(x)));
  }
  // Return the results for the numbers that Lanes<T>::load(x, part) loads.
  template <class Part>
  Vec load(const T* x, Part part) const {
    return of(Lanes<T>::load(x, part));
  }
  // Return the results for the first element of every pair.
  template <class Part>
  auto load_first(const T* x, Part part) const {
    return of(load_pairs(x, part).first);
  }
  template <class Part>
  Halves halves(const T* x, Part part) const {
    const auto result = [=](int64_t i, auto p) { return function(Lanes<T>::load(x + i, p)); };
    return halves_of(0, result, part);
  }

  Function function;
};

// Looks up the results one by one in a table of all 16-bit numbers.
template <class T>
struct LookedUp {
  static constexpr int kBegun = 1;

  template <class Part>
  Vec load(const T* x, Part part) const {
    return load<1>(x, part);
  }
  template <class Part>
  Vec load_first(const T* x, Part part) const {
    return load<2>(x, part);
  }

  // Store the results of n numbers; out may be x. With AVX-512, `next` is prefetched.
  template <class Ahead>
  void copy(T* out, const T* x, int64_t n, Ahead next) const {
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine) {
      if constexpr (kLanes == 16) next.fetch(i);
      for (int64_t k = i; k < i + kLine; k += 8) copy_eight(out + k, x + k);
    }
    for (; i + 8 <= n; i += 8) copy_eight(out + i, x + i);
    for (; i < n; ++i) out[i] = results[x[i].bits];
  }

  const T* results;

 private:
  static constexpr int64_t kLine = kCacheLine / sizeof(T);

  void copy_eight(T* out, const T* x) const {
    const Eight words = eight<1>(x);
    memcpy(out, &words, sizeof words);
  }

  template <int kStep>
  Vec load(const T* x, Tail tail) const {
    T found[kLanes] = {};
    for (int64_t i = 0; i < tail.count; ++i) found[i] = results[x[i * kStep].bits];
    return Lanes<T>::load(found, Full{});
  }
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
  template <int kStep>
  Vec load(const T* x, Full) const {
    return widen(reinterpret_cast<__m128i>(eight<kStep>(x)), T{});
  }
  template <int kStep>
  Vec load(const T* x, Even) const {
    return even_of(sixteen(x), T{});
  }
  template <int kStep>
  Vec load(const T* x, Odd) const {
    return odd_of(sixteen(x), T{});
  }
  __m256i sixteen(const T* x) const {
    return _mm256_set_m128i(reinterpret_cast<__m128i>(eight<1>(x + 8)),
                            reinterpret_cast<__m128i>(eight<1>(x)));
  }
#else
  template <int kStep>
  Vec load(const T* x, Full) const {
    return load<kStep>(x, Tail{kLanes});
  }
#endif

  template <int kStep>
  __attribute__((always_inline)) Eight eight(const T* x) const {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first number is the lowest");
    uint64_t numbers[2 * kStep];  // loads four numbers at once
    memcpy(numbers, x, sizeof numbers);
    const auto word = [&](int k) {
      return results[static_cast<uint16_t>(numbers[k * kStep / 4] >> 16 * (k * kStep % 4))].bits;
    };
    Eight words = with_word<0>(Eight{}, word(0));
    words = with_word<1>(words, word(1));
    words = with_word<2>(words, word(2));
    words = with_word<3>(words, word(3));
    words = with_word<4>(words, word(4));
    words = with_word<5>(words, word(5));
    words = with_word<6>(words, word(6));
    return with_word<7>(words, word(7));
  }
};

// Store values that are exactly numbers of T, without rounding, which would flush denormals with
// AVX512-BF16.
template <class T>
inline void store_rounded(T* p, Vec v) {
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, BFloat16)) {
    const __m256i words = upper_words(_mm512_castps_si512(v));
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
  }
#endif
  Lanes<T>::store(p, v, Full{});
}

template <class T>
class ResultTable {
 public:
  static constexpr int64_t kSize = 65536;

  // Whether the table is cheap compared with the call, and the call exceeds the CPU caches.
  static bool is_worth_it(int64_t elements) { return elements >= 8 * kSize; }

  template <class Function>
  explicit ResultTable(Function function)
      : ResultTable(function, [](T* p, Vec v) { Lanes<T>::store(p, v, Full{}); }) {}

  // store(p, v) rounds the results of the function to T.
  template <class Function, class Store>
  ResultTable(Function function, Store store) {
    T* results = padded_ + kPadding;
    for (int64_t i = 0; i < kSize; ++i) results[i].bits = static_cast<uint16_t>(i);
    for (int64_t i = 0; i < kSize; i += kAtOnce * kLanes) {
      Vec found[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) {
        found[k] = function(Lanes<T>::load(results + i + k * kLanes, Full{}));
      }
      for (int k = 0; k < kAtOnce; ++k) store(results + i + k * kLanes, found[k]);
    }
  }

  auto look_up() const {
    const T* results = padded_ + kPadding;
    if constexpr (kGathers) {
      return Gathered<T>{results};
    } else {
      return LookedUp<T>{results};
    }
  }

 private:
  // With one element before the table, the gather for zero does not cross a cache line.
  static constexpr int64_t kPadding = kGathers ? 1 : 0;

  alignas(kCacheLine) T padded_[kPadding + kSize + kPadding];
};

// Call visit with the results of an activation, rounded to T: computed or, with kMayLookUp,
// possibly looked up. With AVX-512, computing a result is as fast as a single look-up.
template <class T, bool kMayLookUp, class Activation, class Visit>
inline void with_rounded(Activation activation, int64_t elements, Visit visit) {
  if constexpr (kMayLookUp && sizeof(T) == sizeof(uint16_t) && (kLanes <= 8 || kGathers)) {
    if (ResultTable<T>::is_worth_it(elements)) {
      const ResultTable<T> table([=](Vec x) { return rounded_result<T>(activation, x); },
                                 [](T* p, Vec v) { store_rounded(p, v); });
      return visit(table.look_up());
    }
  }
  visit(Computed<T, Activation>{activation});
}

// The rounded results of `gate` times the elements of `other`; the products are not rounded.
template <class T, class Activated>
struct GatedProduct {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    return mul(activated.load(gate + i, part), Lanes<T>::load(other + i, part));
  }
  Halves operator()(int64_t i, FullHalves part) const { return halves(i, part); }
  Halves operator()(int64_t i, TailHalves part) const { return halves(i, part); }

  Activated activated;
  const T* gate;
  const T* other;

 private:
  template <class Part>
  Halves halves(int64_t i, Part part) const {
    return mul(activated.halves(gate + i, part), load_halves(other + i, part));
  }
};

template <class Activated>
constexpr bool kGivesHalves<GatedProduct<Float16, Activated>> = kHasHalves;

}  // namespace
