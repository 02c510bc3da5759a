// Tokens packed for steps through the blocks of GGUF files, and the products with them.
//
// A step is one block of 256 columns, or as many smaller blocks as fill vectors; the last step of a
// row may have fewer. Its weights are slices of 64 columns: vectors of bytes, whose even and odd
// bytes become words. A lane of 32 bits has four columns of one scale. isa/gguf_steps_avx512.h and,
// for tokens of 8 bits, isa/gguf_steps_avx2.h have for each format:
//   Format::kSlices      slices per step
//   Format::kJoined      slices whose lanes have the same scales, one after the other
//   Format::kZero        the q that stands for zero
//   Format::column       the column of a byte of a slice; in order for each 16 bytes
//   Format::factors      the scales of a step, and its offsets if Format::kHasOffsets, in kFactors
//                        vectors
//   Format::place        the factor of what a lane of the packed factors is multiplied by
//   Format::slice<j>     the words of a slice
//   Format::bytes<j>     the q of a slice as bytes, plus Format::kByteBias
//   Format::kLargest     the largest of these bytes
//   Format::spread<j>    for each lane of a slice, its factor
//   Format::add_offsets  adds the lanes of the factors that are offsets
// Other instruction sets have no steps.
#pragma once

#include "kernels/gguf_tokens.h"
#include "kernels/prefetch.h"

namespace {

// The steps of a format, for tokens of 8 bits or others; void without steps.
template <class Block, bool kIsInt8>
struct StepsOf {
  using type = void;
};

// Blocks of 16 bytes: the low four bits of each, then the high ones.
template <class B>
struct NibbleLayout {
  using Block = B;
  static constexpr int kSlices = 2, kJoined = 2, kFactors = 1;
  static constexpr int kByteBias = 0, kLargest = 15;

  static constexpr int column(int slice, int byte) {
    return byte / 16 * kUnit32 + slice * 16 + byte % 16;
  }
  static constexpr int place(int lane) { return lane / 4; }
};

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/gguf_steps_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/isa/gguf_steps_avx2.h"
#endif

namespace {

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OPWEAVE_STEPS(Block, Steps)  \
  template <bool kIsInt8>            \
  struct StepsOf<Block, kIsInt8> {   \
    using type = Steps;              \
  }
#else
#define OPWEAVE_STEPS(Block, Steps) \
  template <>                       \
  struct StepsOf<Block, true> {     \
    using type = Steps;             \
  }
#endif
OPWEAVE_STEPS(Q8_0, Steps8_0);
OPWEAVE_STEPS(Q4_0, Steps4_0);
OPWEAVE_STEPS(Q4_1, Steps4_1);
OPWEAVE_STEPS(Q4_K, Steps4_K);
OPWEAVE_STEPS(Q5_K, Steps5_K);
OPWEAVE_STEPS(Q6_K, Steps6_K);
#undef OPWEAVE_STEPS
#endif

constexpr int kSliceColumns = 4 * static_cast<int>(kLanes);

template <class F>
constexpr int64_t kFactorLanes = F::kFactors * kLanes;
template <class F>
constexpr int64_t kStepColumns = kSliceColumns * F::kSlices;
template <class F>
constexpr int64_t kStepBytes = kStepColumns<F> / (F::Block::kUnits * kUnit32) * F::Block::kBytes;

template <int P>
struct alignas(64) SliceX {
  int16_t numbers[P][2][2 * kLanes];  // even bytes, odd bytes
  int32_t start[P][kLanes];           // -kZero times the sums of the lanes of kJoined slices

  void set(int p, int i, int16_t number) { numbers[p][i % 2][i / 2] = number; }
};

template <>
struct alignas(64) SliceX<kInt8> {
  int8_t numbers[kSliceColumns];
  int32_t start[1][kLanes];

  void set(int, int i, int16_t number) { numbers[i] = static_cast<int8_t>(number); }
};

// The byte that stands for zero where tokens are of P parts.
template <class F, int P>
constexpr int32_t kZeroOf = F::kZero + (P == kInt8 ? F::kByteBias : 0);

// A packed token: whether it is finite, the factors of its steps, and their slices.
template <class F, int P>
struct TokenSteps {
  static int64_t count(int64_t width) { return (width + kStepColumns<F> - 1) / kStepColumns<F>; }
  static int64_t bytes(int64_t width) {
    constexpr auto kStep =
        static_cast<int64_t>(F::kFactors * sizeof(Vec) + F::kSlices * sizeof(SliceX<P>));
    return ((static_cast<int64_t>(sizeof(TokenHeader)) + count(width) * kStep + 63) / 64 | 1) * 64;
  }

  OPWEAVE_INLINE TokenSteps(const char* token, int64_t width)
      : factors(reinterpret_cast<const float*>(token + sizeof(TokenHeader))),
        slices(reinterpret_cast<const SliceX<P>*>(factors + (count(width) * kFactorLanes<F> + 15) / 16 * 16)) {}

  const float* factors;
  const SliceX<P>* slices;
};

// Pack the columns of a step; returns the largest magnitude as bits.
template <class F, int P>
inline uint32_t pack_step(float* factors, SliceX<P>* slices, const float* columns) {
  constexpr int kUnits = kStepColumns<F> / kUnit32;
  UnitX<P> units[kUnits];
  float scales[kUnits];
  float sums[kUnits];
  uint32_t largest = 0;
  for (int u = 0; u < kUnits; ++u) {
    const uint32_t magnitude = pack_unit<P>(units[u], scales[u], sums[u], columns + u * kUnit32);
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int lane = 0; lane < kFactorLanes<F>; ++lane) {
    const int unit = F::place(lane);
    factors[lane] = F::is_offset(lane) ? F::kOffsetFactor * sums[unit] : scales[unit];
  }
  for (int j = 0; j < F::kSlices; ++j) {
    for (int p = 0; p < kIntegers<P>; ++p) {
      int32_t* start = slices[j / F::kJoined * F::kJoined].start[p];
      for (int lane = 0; lane < kLanes; ++lane) start[lane] = j % F::kJoined == 0 ? 0 : start[lane];
      for (int run = 0; run < kSliceColumns; run += 16) {
        const int column = F::column(j, run);
        const int16_t* numbers = units[column / kUnit32].numbers[p] + column % kUnit32;
        for (int i = 0; i < 16; ++i) slices[j].set(p, run + i, numbers[i]);
        for (int i = 0; i < 16; ++i) start[(run + i) / 4] -= kZeroOf<F, P> * numbers[i];
      }
    }
  }
  return largest;
}

template <class F, int P, class T>
inline void pack_steps(char* out, const T* x, int64_t width) {
  const TokenSteps<F, P> token(out, width);
  auto* factors = const_cast<float*>(token.factors);
  auto* slices = const_cast<SliceX<P>*>(token.slices);
  uint32_t largest = 0;
  for (int64_t c = 0; c < width; c += kStepColumns<F>) {
    alignas(64) float columns[kStepColumns<F>] = {};
    const int64_t count = width - c < kStepColumns<F> ? width - c : kStepColumns<F>;
    for_each_vec(count, [&](int64_t i, auto part) {
      Lanes<float>::store(columns + i, Lanes<T>::load(x + c + i, part), Full{});
    });
    const uint32_t magnitude = pack_step<F, P>(factors, slices, columns);
    largest = magnitude > largest ? magnitude : largest;
    factors += kFactorLanes<F>;
    slices += F::kSlices;
  }
  reinterpret_cast<TokenHeader*>(out)->is_finite = largest < 0x7f800000u;
}

// The weights of a slice as they are multiplied by tokens of P parts.
template <int P>
struct SliceWeightsOf {
  using type = Words[2];
};
template <>
struct SliceWeightsOf<kInt8> {
  using type = Words;
};
template <int P>
using SliceWeights = typename SliceWeightsOf<P>::type;

// The products of R rows, `apart` rows from each other, with T tokens.
template <class F, int P, int R, int T>
class StepProducts {
 public:
  StepProducts(int64_t row, int64_t apart, int64_t first_token, const OpweaveLinearGguf& call)
      : width_(call.weight.width) {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      blocks_[r] = call.weight.blocks + (row + r * apart) * call.weight.stride;
    }
    OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
      x_[t] = static_cast<const char*>(call.x) + (first_token + t) * call.kept->stride;
    }
  }

  void run() {
    // Local, so that they stay in registers.
    Vec totals[R][T];
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) totals[r][t] = splat(0);
    }
    const int64_t whole = width_ / kStepColumns<F>;
    for (int64_t step = 0; step < whole; ++step) {
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
        const uint8_t* from = blocks_[r] + step * kStepBytes<F>;
        if constexpr (R > 1) prefetch(from + Tuning::kLowBitStreamAhead, kStepBytes<F>);
        add_step(totals[r], step, from);
      }
    }
    if constexpr (F::Block::kUnits == 1) {
      const int64_t rest = width_ % kStepColumns<F> / kUnit32 * F::Block::kBytes;
      if (rest > 0) {
        OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
          uint8_t blocks[kStepBytes<F>] = {};
          memcpy(blocks, blocks_[r] + whole * kStepBytes<F>, static_cast<size_t>(rest));
          add_step(totals[r], whole, blocks);
        }
      }
    }
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) totals_[r][t] = totals[r][t];
    }
  }

  Vec total(int r, int t) const { return totals_[r][t]; }

 private:
  OPWEAVE_INLINE void add_step(Vec (&totals)[T], int64_t step, const uint8_t* from) const {
    Vec of_weights[F::kFactors];
    F::factors(of_weights, from);
    Vec factors[T][F::kFactors];
    OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
      const float* of_token = TokenSteps<F, P>(x_[t], width_).factors + step * kFactorLanes<F>;
      OPWEAVE_UNROLL for (int i = 0; i < F::kFactors; ++i) {
        factors[t][i] = mul(of_weights[i], Lanes<float>::load(of_token + i * kLanes, Full{}));
      }
      if constexpr (F::kHasOffsets) totals[t] = F::add_offsets(totals[t], factors[t]);
    }
    each_index<F::kSlices / F::kJoined>([&](auto index) __attribute__((always_inline)) {
      constexpr int kFirst = decltype(index)::value * F::kJoined;
      SliceWeights<P> weights[F::kJoined];
      each_index<F::kJoined>([&](auto j) __attribute__((always_inline)) {
        constexpr int kJ = decltype(j)::value;
        if constexpr (P == kInt8) {
          weights[kJ] = F::template bytes<kFirst + kJ>(from);
        } else {
          F::template slice<kFirst + kJ>(weights[kJ], from);
        }
      });
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
        const SliceX<P>* x = TokenSteps<F, P>(x_[t], width_).slices + step * F::kSlices + kFirst;
        const Vec spread = F::template spread<kFirst>(factors[t]);
        totals[t] = fma(slice_products(weights, x), spread, totals[t]);
      }
    });
  }

#if defined(OPWEAVE_MULTIPLIES_BYTES)
  OPWEAVE_INLINE static Vec slice_products(const SliceWeights<kInt8> (&weights)[F::kJoined],
                                           const SliceX<kInt8>* x) {
    Sums32 sums = kZeroOf<F, P> != 0 ? load_sums(x->start[0]) : Sums32{};
    OPWEAVE_UNROLL for (int j = 0; j < F::kJoined; ++j) {
      sums = add_byte_products<F::kLargest>(sums, weights[j], x[j].numbers);
    }
    return to_float(sums);
  }
#endif

  template <int N>
  OPWEAVE_INLINE static Vec slice_products(const Words (&words)[F::kJoined][2],
                                           const SliceX<N>* x) {
    Sums32 sums[P];
    OPWEAVE_UNROLL for (int p = 0; p < P; ++p) {
      sums[p] = F::kZero != 0 ? load_sums(x->start[p]) : Sums32{};
      OPWEAVE_UNROLL for (int j = 0; j < F::kJoined; ++j) {
        OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) {
          sums[p] = add_products(sums[p], load_words16(x[j].numbers[p][i]), words[j][i]);
        }
      }
    }
    if constexpr (P == 1) return to_float(sums[0]);
    return fma(to_float(sums[P - 1]), splat(0x1p-15f), to_float(sums[0]));
  }

  int64_t width_;
  const uint8_t* blocks_[R];
  const char* x_[T];
  Vec totals_[R][T];
};

}  // namespace
