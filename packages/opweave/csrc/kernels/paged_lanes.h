// Products of many queries and keys with one query per lane, which avoids horizontal sums. The
// results are bitwise equal to those of vectors of one query and one key: one sum per lane
// position, combined in the order of sums().
//
// A unit is the content of a lane: 32 bits, one number or a pair.
#pragma once

#include "kernels/vec_dot.h"

namespace {

// The numbers of query vectors and keys that are multiplied at once, limited by the registers for
// the sums of two lanes each.
constexpr int kQueryVecs = 3;
constexpr int kKeysAtOnce = kLanes / 4;
constexpr int64_t kQueriesAtOnce = kQueryVecs * kLanes;

template <class K>
constexpr int64_t kPerUnit = Dot<K>::kWidth / kLanes;

inline Vec splat_unit(const float* key) { return splat(*key); }

#if defined(__AVX512BF16__)
inline __m512bh splat_unit(const BFloat16* keys) {
  int both;
  memcpy(&both, keys, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}
#endif

// Reorder kQueriesAtOnce queries of so many vectors for multiply_lanes: lane by lane, in kSumOrder,
// the unit of this lane in each vector of all queries.
inline void order_by_lanes(float* to, const float* queries, int64_t stride, int64_t vectors) {
  for (int64_t q = 0; q < kQueryVecs; ++q, queries += kLanes * stride) {
    for (int64_t i = 0; i < vectors; ++i) {
      Vec units[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        units[r] = Lanes<float>::load(queries + r * stride + i * kLanes, Full{});
      }
      transpose(units);
      for (int64_t o = 0; o < kLanes; ++o) {
        float* unit = to + ((o * vectors + i) * kQueryVecs + q) * kLanes;
        Lanes<float>::store(unit, units[kSumOrder[o]], Full{});
      }
    }
  }
}

using LaneSums = Vec[kKeysAtOnce][kQueryVecs];

inline void add_to(LaneSums& sums, const LaneSums& others) {
  OPWEAVE_UNROLL for (int k = 0; k < kKeysAtOnce; ++k) {
    OPWEAVE_UNROLL for (int q = 0; q < kQueryVecs; ++q) sums[k][q] = add(others[k][q], sums[k][q]);
  }
}

// Add the products of a unit of each query and a unit of each key.
template <class K>
__attribute__((always_inline)) inline void add_unit(LaneSums& sums, const float* queries,
                                                    const K* keys, int64_t size) {
  decltype(Dot<K>::query(nullptr)) query[kQueryVecs];
  OPWEAVE_UNROLL for (int q = 0; q < kQueryVecs; ++q) {
    using Query = typename Dot<K>::Query;
    query[q] = in_register(Dot<K>::query(reinterpret_cast<const Query*>(queries + q * kLanes)));
  }
  OPWEAVE_UNROLL for (int k = 0; k < kKeysAtOnce; ++k) {
    const auto key = splat_unit(keys + k * size);
    OPWEAVE_UNROLL for (int q = 0; q < kQueryVecs; ++q) {
      sums[k][q] = Dot<K>::step(query[q], key, sums[k][q]);
    }
  }
}

// Queries in lane order, and keys.
template <class K>
struct LaneOperands {
  const float* queries;
  const K* keys;
  int64_t vectors;
};

// Compute the sums of kCount lanes, from index kFirst in kSumOrder on. The recursion is inlined
// into one function: loops over the lanes would mispredict branches and take 1.1 times as long.
template <int kFirst, int kCount, class K>
__attribute__((always_inline)) inline void sum_lanes(LaneSums& sums, LaneOperands<K> from) {
  if constexpr (kCount == 2) {
    LaneSums others;
    OPWEAVE_UNROLL for (int k = 0; k < kKeysAtOnce; ++k) {
      OPWEAVE_UNROLL for (int q = 0; q < kQueryVecs; ++q) sums[k][q] = others[k][q] = splat(0);
    }
    const int64_t size = from.vectors * Dot<K>::kWidth;
    const int64_t lane = from.vectors * kQueriesAtOnce;
    const float* queries = from.queries + kFirst * lane;
    const K* first = from.keys + kSumOrder[kFirst] * kPerUnit<K>;
    const K* second = from.keys + kSumOrder[kFirst + 1] * kPerUnit<K>;
    for (int64_t i = 0; i < from.vectors; ++i) {
      add_unit(sums, queries + i * kQueriesAtOnce, first + i * Dot<K>::kWidth, size);
      add_unit(others, queries + lane + i * kQueriesAtOnce, second + i * Dot<K>::kWidth, size);
    }
    add_to(sums, others);
  } else {
    LaneSums before;
    sum_lanes<kFirst, kCount / 2>(before, from);
    sum_lanes<kFirst + kCount / 2, kCount / 2>(sums, from);
    add_to(sums, before);
  }
}

// Compute products[k][query] for kKeysAtOnce keys.
template <class K>
__attribute__((noinline)) void multiply_lanes(float (*products)[kQueriesAtOnce],
                                              const float* queries, const K* keys,
                                              int64_t vectors) {
  LaneSums sums;
  sum_lanes<0, kLanes>(sums, LaneOperands<K>{queries, keys, vectors});
  memcpy(products, sums, sizeof sums);
}

}  // namespace
