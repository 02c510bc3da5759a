// Steps through the blocks of GGUF files with AVX-512; see gguf_steps.h.
#pragma once

#include "kernels/gguf_blocks.h"

namespace {

OPWEAVE_INLINE __m512i load_64(const uint8_t* p) { return _mm512_loadu_si512(p); }

// 32 bytes, twice.
OPWEAVE_INLINE __m512i load_32_twice(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Shift the words of the two halves of a vector by different numbers of bits.
OPWEAVE_INLINE __m512i halves_left(__m512i v, int first, int second) {
  const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(first)),
                                          _mm256_set1_epi16(static_cast<short>(second)), 1);
  return _mm512_sllv_epi16(v, bits);
}
OPWEAVE_INLINE __m512i halves_right(__m512i v, int first, int second) {
  const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(first)),
                                          _mm256_set1_epi16(static_cast<short>(second)), 1);
  return _mm512_srlv_epi16(v, bits);
}

// The float16 at the given words of 64 bytes, each for a range of lanes.
OPWEAVE_INLINE Vec halves_at(const uint8_t* p, __m256i words) {
  const __m512i places = _mm512_castsi256_si512(words);
  return _mm512_cvtph_ps(
      _mm512_castsi512_si256(_mm512_permutexvar_epi16(places, load_64(p))));
}

// The four bits of bytes: kHigh says which.
template <bool kHigh>
OPWEAVE_INLINE void nibble_words(Words (&to)[2], __m512i packed) {
  to[0] = nibbles<kHigh ? 1 : 0>(packed);
  to[1] = nibbles<kHigh ? 3 : 2>(packed);
}

OPWEAVE_INLINE void byte_words(Words (&to)[2], __m512i bytes) {
  to[0] = _mm512_and_si512(bytes, _mm512_set1_epi16(0xff));
  to[1] = _mm512_srli_epi16(bytes, 8);
}

// The last 16 bytes of four blocks. Inserting them is faster than loading each into all four places.
template <int kBytes>
OPWEAVE_INLINE __m512i four_blocks(const uint8_t* from) {
  const auto at = [from](int block) {
    return _mm_loadu_si128(
        reinterpret_cast<const __m128i*>(from + (block + 1) * kBytes - 16));
  };
  const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1);
  const __m256i second = _mm256_inserti128_si256(_mm256_castsi128_si256(at(2)), at(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

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

// Offsets are in odd lanes.
struct OffsetsInOddLanes {
  static constexpr bool kHasOffsets = true;

  static constexpr bool is_offset(int lane) { return lane % 2 == 1; }
  OPWEAVE_INLINE static Vec add_offsets(Vec total, const Vec (&factors)[1]) {
    constexpr __mmask16 kOddLanes = 0xaaaa;
    return _mm512_mask_add_ps(total, kOddLanes, total, factors[0]);
  }
};

// Four blocks.
template <class B>
struct StepsOfNibbles : NibbleLayout<B> {
  template <int J>
  OPWEAVE_INLINE static void slice(Words (&to)[2], const uint8_t* from) {
    nibble_words<J == 1>(to, four_blocks<B::kBytes>(from));
  }
  template <int J>
  OPWEAVE_INLINE static __m512i bytes(const uint8_t* from) {
    return nibble_bytes<J == 1>(four_blocks<B::kBytes>(from));
  }
};

struct Steps4_0 : StepsOfNibbles<Q4_0>, ScalesOfLanes {
  static constexpr int kZero = 8;

  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    constexpr int kWords = Block::kBytes / 2;
    const __m256i step = _mm256_set1_epi16(kWords);
    const __m256i blocks = _mm256_setr_epi16(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    to[0] = halves_at(from, _mm256_mullo_epi16(blocks, step));
  }
};

// Scales are in even lanes, each in two of them, and so are halves of the offsets in odd ones.
struct Steps4_1 : StepsOfNibbles<Q4_1>, OffsetsInOddLanes {
  static constexpr int kZero = 0;
  static constexpr float kOffsetFactor = 0.5f;

  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    constexpr int kWords = Block::kBytes / 2;
    const __m256i step = _mm256_set1_epi16(kWords);
    const __m256i blocks = _mm256_setr_epi16(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m256i odd = _mm256_set1_epi32(1 << 16);
    to[0] = halves_at(from, _mm256_add_epi16(_mm256_mullo_epi16(blocks, step), odd));
  }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[1]) {
    return _mm512_moveldup_ps(factors[0]);
  }
};

// Two blocks of 32 bytes.
struct Steps8_0 : ScalesOfLanes {
  using Block = Q8_0;
  static constexpr int kSlices = 1, kJoined = 1, kFactors = 1, kZero = 0;
  static constexpr int kByteBias = 128, kLargest = 255;

  static constexpr int column(int, int byte) { return byte; }
  static constexpr int place(int lane) { return lane / 8; }
  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    const __m256i second = _mm256_set1_epi16(Block::kBytes / 2);
    to[0] = halves_at(from, _mm256_inserti128_si256(second, _mm_setzero_si128(), 0));
  }
  template <int J>
  OPWEAVE_INLINE static void slice(Words (&to)[2], const uint8_t* from) {
    const __m512i bytes = signed_bytes(from);
    to[0] = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
    to[1] = _mm512_srai_epi16(bytes, 8);
  }
  template <int J>
  OPWEAVE_INLINE static __m512i bytes(const uint8_t* from) {
    return _mm512_xor_si512(signed_bytes(from), _mm512_set1_epi8(-128));
  }

 private:
  OPWEAVE_INLINE static __m512i signed_bytes(const uint8_t* from) {
    const auto at = [from](int block) {
      return _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(from + block * Block::kBytes + 2));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(at(0)), at(1), 1);
  }
};

// Blocks of q4_k and q5_k: 64 bytes have the units 4v, 4v + 2 in the low four bits, and 4v + 1,
// 4v + 3 in the high ones. Scales are in even lanes, and minima in odd ones.
struct StepsSixBits : OffsetsInOddLanes {
  static constexpr int kSlices = 4, kJoined = 1, kFactors = 1, kZero = 0;
  static constexpr int kByteBias = 0, kLargest = 31;
  static constexpr float kOffsetFactor = -1;

  static constexpr int column(int slice, int byte) {
    return (slice / 2 * 4 + slice % 2 + byte / 32 * 2) * kUnit32 + byte % 32;
  }
  static constexpr int place(int lane) { return lane / 2; }
  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    uint32_t both;
    memcpy(&both, from, sizeof(both));
    const Vec of_block = _mm512_cvtph_ps(_mm256_set1_epi32(static_cast<int>(both)));
    uint64_t first;
    uint32_t last;
    memcpy(&first, from + 4, sizeof(first));
    memcpy(&last, from + 12, sizeof(last));
    // Each half of `first` has four scales or minima, and two bits of four more.
    const uint64_t low = first & 0x3f3f3f3f3f3f3f3f;
    const uint64_t top = (first >> 2) & 0x3030303030303030;
    const uint64_t scales = (low & 0xffffffff) | (((last & 0x0f0f0f0f) | (top & 0xffffffff)) << 32);
    const uint64_t minima = (low >> 32) | ((((last >> 4) & 0x0f0f0f0f) | (top >> 32)) << 32);
    const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(scales)),
                                            _mm_cvtsi64_si128(static_cast<int64_t>(minima)));
    to[0] = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), of_block);
  }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[1]) {
    constexpr int kFirst = 2 * (J / 2 * 4 + J % 2);
    const __m512i places =
        _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(kFirst), _mm512_set1_epi32(kFirst + 4));
    return _mm512_permutexvar_ps(places, factors[0]);
  }
};

struct Steps4_K : StepsSixBits {
  using Block = Q4_K;

  template <int J>
  OPWEAVE_INLINE static void slice(Words (&to)[2], const uint8_t* from) {
    nibble_words<J % 2 == 1>(to, load_64(from + 16 + J / 2 * 64));
  }
  template <int J>
  OPWEAVE_INLINE static __m512i bytes(const uint8_t* from) {
    return nibble_bytes<J % 2 == 1>(load_64(from + 16 + J / 2 * 64));
  }
};

struct Steps5_K : StepsSixBits {
  using Block = Q5_K;

  template <int J>
  OPWEAVE_INLINE static void slice(Words (&to)[2], const uint8_t* from) {
    Words low[2];
    nibble_words<J % 2 == 1>(low, load_64(from + 48 + J / 2 * 64));
    const __m512i bits = load_32_twice(from + 16);
    // The bit of unit u of each byte, moved to bit 4.
    Words high[2];
    byte_words(high, J < 2 ? halves_left(bits, 4 - J, 2 - J) : halves_right(bits, J - 2, J));
    OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) to[i] = joined_words(low[i], masked(high[i], 16));
  }
  template <int J>
  OPWEAVE_INLINE static __m512i bytes(const uint8_t* from) {
    const __m512i low = nibble_bytes<J % 2 == 1>(load_64(from + 48 + J / 2 * 64));
    const __m512i bits = load_32_twice(from + 16);
    const __m512i high = J < 2 ? halves_left(bits, 4 - J, 2 - J) : halves_right(bits, J - 2, J);
    // low | (high & 16), bit by bit.
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(16), 0xf8);
  }
};

// 64 bytes and 32 bytes of q6_k have 128 columns in order: the low four bits, then the high ones,
// and two bits of four units.
struct Steps6_K {
  using Block = Q6_K;
  static constexpr int kSlices = 4, kJoined = 1, kFactors = 1, kZero = 32;
  static constexpr int kByteBias = 0, kLargest = 63;
  static constexpr bool kHasOffsets = false;
  static constexpr float kOffsetFactor = 0;

  static constexpr int column(int slice, int byte) { return slice * 64 + byte; }
  static constexpr int place(int lane) { return lane / 2; }
  static constexpr bool is_offset(int) { return false; }
  OPWEAVE_INLINE static void factors(Vec (&to)[1], const uint8_t* from) {
    int16_t scale;
    memcpy(&scale, from + 208, sizeof(scale));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 192));
    to[0] = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)),
               _mm512_cvtph_ps(_mm256_set1_epi16(scale)));
  }
  template <int J>
  OPWEAVE_INLINE static void slice(Words (&to)[2], const uint8_t* from) {
    byte_words(to, bytes<J>(from));
  }
  template <int J>
  OPWEAVE_INLINE static __m512i bytes(const uint8_t* from) {
    const __m512i packed = load_64(from + J / 2 * 64);
    const __m512i bits = load_32_twice(from + 128 + J / 2 * 32);
    const __m512i low = J % 2 == 1 ? _mm512_srli_epi16(packed, 4) : packed;
    const __m512i high = J % 2 == 1 ? halves_right(bits, 0, 2) : halves_left(bits, 4, 2);
    // (low & 15) | (high & 48), bit by bit: 0xca is a ? b : c.
    const __m512i either =
        _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
    return _mm512_and_si512(either, _mm512_set1_epi8(63));
  }
  template <int J>
  OPWEAVE_INLINE static Vec spread(const Vec (&factors)[1]) {
    const __m512i quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(quarters, _mm512_set1_epi32(4 * J)), factors[0]);
  }
};

}  // namespace
