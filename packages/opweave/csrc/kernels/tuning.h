// Tuning for CPU models: how much to prefetch and how many vectors to compute at once. It changes
// the speed of kernels, never their results.
//
// A level (isa/levels.cmake) selects one of these structs with OPWEAVE_TUNING, and kernels use it
// as Tuning.
#pragma once

#include <stdint.h>

namespace {

namespace tuning {

struct Generic {
  // Whether the hardware prefetcher crosses page boundaries when one row is read at a time, so that
  // software prefetching is slower.
  static constexpr bool kFollowsPages = false;
  // Whether to prefetch the whole next row in the first of two passes, if that one takes longer,
  // instead of half of it in each.
  static constexpr bool kFetchesInLongPass = false;
  // Whether to prefetch float32 rows during the sum of an RMS norm, too.
  static constexpr bool kFetchesInSum = false;
  // Vectors of 16-bit results in flight before the first is stored; limited by the registers.
  static constexpr int kInFlight = 4;
  // Prefetch distances in bytes for streams of weights: one that hides the latency of the memory,
  // and one that hides the latency of the L2 cache, or 0.
  static constexpr int64_t kStreamAhead = 2048;
  static constexpr int64_t kStreamNear = 0;
  // The first of them for weights of few bits, whose rows are shorter; best on Zen 4 and Xeons.
  static constexpr int64_t kLowBitStreamAhead = 1024;
};

struct Zen4 : Generic {
  static constexpr bool kFollowsPages = true;
  static constexpr bool kFetchesInLongPass = true;
  static constexpr bool kFetchesInSum = true;
  static constexpr int kInFlight = 8;
};

struct SapphireRapids : Generic {
  static constexpr int64_t kStreamAhead = 1024;
  static constexpr int64_t kStreamNear = 256;
};

}  // namespace tuning

#ifndef OPWEAVE_TUNING
#define OPWEAVE_TUNING Generic
#endif
using Tuning = tuning::OPWEAVE_TUNING;

}  // namespace
