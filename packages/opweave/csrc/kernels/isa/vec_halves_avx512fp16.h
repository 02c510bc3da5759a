// float16 arithmetic with 32 lanes; see vec_halves.h.
#pragma once

#include "kernels/vec.h"

namespace {

constexpr bool kHasHalves = true;
constexpr int64_t kHalves = 32;
using Halves = __m512h;

inline Halves add(Halves a, Halves b) { return _mm512_add_ph(a, b); }
inline Halves sub(Halves a, Halves b) { return _mm512_sub_ph(a, b); }
inline Halves mul(Halves a, Halves b) { return _mm512_mul_ph(a, b); }
inline Halves min(Halves a, Halves b) { return _mm512_min_ph(a, b); }  // NaN: as for Vec
inline Halves max(Halves a, Halves b) { return _mm512_max_ph(a, b); }

// Swap the lanes of every pair.
inline Halves swap_pairs(Halves v) {
  return _mm512_castsi512_ph(_mm512_rol_epi32(_mm512_castph_si512(v), 16));
}

inline __mmask32 mask_of(TailHalves tail) {
  return static_cast<__mmask32>((uint64_t{1} << tail.count) - 1);
}

inline Halves load_halves(const Float16* p, FullHalves) { return _mm512_loadu_ph(p); }
inline Halves load_halves(const Float16* p, TailHalves tail) {
  touch(p, Tail{tail.count});
  return _mm512_castsi512_ph(_mm512_maskz_loadu_epi16(mask_of(tail), p));
}

inline void store_halves(Float16* p, Halves v, FullHalves) { _mm512_storeu_ph(p, v); }
inline void store_halves(Float16* p, Halves v, TailHalves tail) {
  touch(p, Tail{tail.count});
  _mm512_mask_storeu_epi16(p, mask_of(tail), _mm512_castph_si512(v));
}

inline Halves halves_of(Vec first, Vec second) {
  const __m512i low = _mm512_castsi256_si512(narrow(first, Float16{}));
  return _mm512_castsi512_ph(_mm512_inserti64x4(low, narrow(second, Float16{}), 1));
}

inline Vec first_of(Halves v) {
  return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_castph_si512(v)));
}
inline Vec second_of(Halves v) {
  return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(_mm512_castph_si512(v), 1));
}

inline Halves like(Halves, Vec v) { return halves_of(v, v); }

template <class T>
inline Halves rounded(Halves v) {
  return v;
}

// Return the float32 vectors at element i, rounded to float16.
template <class Value>
inline Halves halves_of(int64_t i, Value value, FullHalves) {
  return halves_of(value(i, Full{}), value(i + kLanes, Full{}));
}
template <class Value>
inline Halves halves_of(int64_t i, Value value, TailHalves tail) {
  const int64_t past = tail.count - kLanes;
  if (past <= 0) return halves_of(value(i, Tail{tail.count}), splat(0));
  return halves_of(value(i, Full{}), value(i + kLanes, Tail{past}));
}

// Call visit(i, FullHalves{}) for all whole vectors of n elements, then visit(i, TailHalves{rest}).
template <class Visit>
inline void for_each_halves(int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) visit(i, FullHalves{});
  if (i < n) visit(i, TailHalves{n - i});
}

// Store a row of value(i, part); kCount vectors are computed before the first is stored.
template <int kCount, class Value>
inline void store_row_of_halves(Float16* out, int64_t n, Value value) {
  int64_t i = 0;
  for (; i + kCount * kHalves <= n; i += kCount * kHalves) {
    Halves begun[kCount];
    announce<kCount * kHalves>(value, i);
    for (int k = 0; k < kCount; ++k) begun[k] = value(i + k * kHalves, FullHalves{});
    for (int k = 0; k < kCount; ++k) store_halves(out + i + k * kHalves, begun[k], FullHalves{});
  }
  for_each_halves(n - i, [=](int64_t past, auto part) {
    store_halves(out + i + past, value(i + past, part), part);
  });
}

}  // namespace
