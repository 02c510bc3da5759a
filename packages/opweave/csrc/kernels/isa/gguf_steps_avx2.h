// Steps through the blocks of GGUF files with AVX2, for tokens of 8 bits; see gguf_steps.h.
#pragma once

#include "kernels/gguf_blocks.h"

namespace {

OPWEAVE_INLINE __m256i load_32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// The bits of `mask` of each byte, after a shift to the left, or to the right if kLeft is negative.
template <int kLeft>
OPWEAVE_INLINE __m256i moved_bits(__m256i bytes, char mask) {
  return _mm256_and_si256(moved<kLeft>(bytes), _mm256_set1_epi8(mask));
}

// Two blocks.
template <class B>
struct StepsOfNibbles : NibbleLayout<B> {
  template <int J>
  OPWEAVE_INLINE static __m256i bytes(const uint8_t* from) {
    const auto at = [from](int block) {
      return _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(from + (block + 1) * B::kBytes - 16));
    };
    return nibble_bytes<J == 1>(_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1));
  }
};

// A lane has the factor of the same lane.
struct ScalesOfLanes {
  static constexpr bool kHasOffsets = false;
  static constexpr float kOffsetFactor = 0;

  static constexpr bool is_offset(int) { return false; }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[1]) {
    return factors[0];
  }
};

struct Steps4_0 : StepsOfNibbles<Q4_0>, ScalesOfLanes {
  static constexpr int kZero = 8;

  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    const __m128 first = _mm_set1_ps(half_at(from));
    const __m128 second = _mm_set1_ps(half_at(from + Block::kBytes));
    to[0] = _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
  }
};

// Scales are in even lanes, each in two of them, and so are halves of the offsets in odd ones.
struct Steps4_1 : StepsOfNibbles<Q4_1> {
  static constexpr int kZero = 0;
  static constexpr bool kHasOffsets = true;
  static constexpr float kOffsetFactor = 0.5f;

  static constexpr bool is_offset(int lane) { return lane % 2 == 1; }
  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    int32_t first, second;
    memcpy(&first, from, sizeof(first));
    memcpy(&second, from + Block::kBytes, sizeof(second));
    to[0] = _mm256_cvtph_ps(_mm_setr_epi32(first, first, second, second));
  }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[1]) {
    return _mm256_moveldup_ps(factors[0]);
  }
  OPWEAVE_INLINE static Vec add_offsets(Vec total, const Vec (&factors)[1]) {
    return add(total, _mm256_blend_ps(splat(0), factors[0], 0xaa));
  }
};

struct Steps8_0 : ScalesOfLanes {
  using Block = Q8_0;
  static constexpr int kSlices = 1, kJoined = 1, kFactors = 1, kZero = 0;
  static constexpr int kByteBias = 128, kLargest = 255;

  static constexpr int column(int, int byte) { return byte; }
  static constexpr int place(int) { return 0; }
  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    to[0] = splat(half_at(from));
  }
  template <int J>
  OPWEAVE_INLINE static __m256i bytes(const uint8_t* from) {
    return _mm256_xor_si256(load_32(from + 2), _mm256_set1_epi8(-128));
  }
};

// Blocks of 256 columns: a slice is a unit.
template <class B>
struct StepsOfUnits {
  using Block = B;
  static constexpr int kSlices = 8, kJoined = 1, kFactors = 2;
  static constexpr int kByteBias = 0;

  static constexpr int column(int slice, int byte) { return slice * kUnit32 + byte; }
  OPWEAVE_INLINE static void factors(Vec (&to)[2], const uint8_t* from) {
    Factors of_block;
    Block::load(of_block, from);
    OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) {
      to[i] = Lanes<float>::load(of_block.of + i * kLanes, Full{});
    }
  }
};

// Eight scales, then eight offsets.
template <class B>
struct StepsSixBits : StepsOfUnits<B> {
  static constexpr int kZero = 0, kLargest = 31;
  static constexpr bool kHasOffsets = true;
  static constexpr float kOffsetFactor = 1;

  static constexpr int place(int i) { return i % 8; }
  static constexpr bool is_offset(int i) { return i >= 8; }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[2]) {
    return _mm256_permutevar8x32_ps(factors[0], _mm256_set1_epi32(J));
  }
  OPWEAVE_INLINE static Vec add_offsets(Vec total, const Vec (&factors)[2]) {
    return add(total, factors[1]);
  }
};

struct Steps4_K : StepsSixBits<Q4_K> {
  template <int J>
  OPWEAVE_INLINE static __m256i bytes(const uint8_t* from) {
    return nibble_bytes<J % 2 == 1>(load_32(from + 16 + J / 2 * kUnit32));
  }
};

struct Steps5_K : StepsSixBits<Q5_K> {
  template <int J>
  OPWEAVE_INLINE static __m256i bytes(const uint8_t* from) {
    const __m256i low = nibble_bytes<J % 2 == 1>(load_32(from + 48 + J / 2 * kUnit32));
    return _mm256_or_si256(low, moved_bits<4 - J>(load_32(from + 16), 16));
  }
};

struct Steps6_K : StepsOfUnits<Q6_K> {
  static constexpr int kZero = 32, kLargest = 63;
  static constexpr bool kHasOffsets = false;
  static constexpr float kOffsetFactor = 0;

  static constexpr int place(int i) { return i / 2; }
  static constexpr bool is_offset(int) { return false; }
  template <int J>
  OPWEAVE_INLINE static __m256i bytes(const uint8_t* from) {
    constexpr int kHalf = J / 4;
    const __m256i packed = load_32(from + kHalf * 64 + J % 2 * kUnit32);
    const __m256i bits = load_32(from + 128 + kHalf * kUnit32);
    return _mm256_or_si256(nibble_bytes<(J % 4 > 1)>(packed),
                           moved_bits<4 - 2 * (J % 4)>(bits, 48));
  }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[2]) {
    const __m256i halves = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i places = _mm256_add_epi32(halves, _mm256_set1_epi32(J % 4 * 2));
    return _mm256_permutevar8x32_ps(factors[J / 4], places);
  }
};

}  // namespace
