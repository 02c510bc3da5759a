// Linear layers with 4-bit weights for few tokens, and widening of such weights; compiled once per
// instruction set.
//
// The kernels are bound by reading the weights. Rows of several streams are processed at once, as
// in linear.cpp, and every output depends only on its own token and weights. Tokens with NaN or
// infinity cannot be packed as integers; their products are computed in float32.
#include "kernels/low_bit.h"

#include "kernels/low_bit_tokens.h"
#include "kernels/low_bit_weights.h"
#include "kernels/packed_outputs.h"
#include "kernels/prefetch.h"
#include "kernels/storage.h"
#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/low_bit_widen_avx512.h"
#endif
#if defined(__AMX_BF16__)
#include "kernels/isa/linear_tiles_amx.h"
#endif

namespace {

constexpr int kStreams = 4;
constexpr int kTogether = kLanes == 16 ? 4 : 2;  // tokens at once; limited by the registers

// Rows of a call that are processed at once, `apart` rows from each other.
struct Rows {
  int64_t first;
  int64_t apart;

  int64_t operator[](int r) const { return first + r * apart; }
};

template <int P>
struct Tokens {
  const Chunk<P>* chunks;
  int64_t stride;  // in bytes

  const Chunk<P>& at(int t, int64_t chunk) const {
    const char* token = reinterpret_cast<const char*>(chunks) + t * stride;
    return reinterpret_cast<const Chunk<P>*>(token)[chunk];
  }
};

// The weights of a chunk, for products with tokens of P parts.
template <int P>
struct ChunkWeights {
  OPWEAVE_INLINE explicit ChunkWeights(Words packed)
      : numbers{nibbles<0>(packed), nibbles<1>(packed), nibbles<2>(packed), nibbles<3>(packed)} {}

  OPWEAVE_INLINE Sums32 products(const Chunk<P>& x, int p) const {
    Sums32 sums = load_sums(x.start[p]);
    OPWEAVE_UNROLL for (int i = 0; i < 4; ++i) {
      sums = add_products(sums, load_words16(x.numbers[p][i]), numbers[i]);
    }
    return sums;
  }

  Words numbers[4];
};

#if defined(OPWEAVE_MULTIPLIES_BYTES)
template <>
struct ChunkWeights<kInt8> {
  OPWEAVE_INLINE explicit ChunkWeights(Words packed)
      : numbers{nibble_bytes<false>(packed), nibble_bytes<true>(packed)} {}

  OPWEAVE_INLINE Sums32 products(const Chunk<kInt8>& x, int) const {
    Sums32 sums = load_sums(x.start[0]);
    OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) {
      sums = add_byte_products<15>(sums, numbers[i], x.numbers[i]);
    }
    return sums;
  }

  Words numbers[2];
};
#endif

// The products of one chunk of weights with a token, as float32 lanes.
template <int P>
OPWEAVE_INLINE Vec chunk_products(const Chunk<P>& x, const ChunkWeights<P>& weights) {
  Vec result = to_float(weights.products(x, 0));
  if constexpr (P == 2) result = fma(to_float(weights.products(x, 1)), splat(0x1p-15f), result);
  return mul(result, Lanes<float>::load(x.scale, Full{}));
}

// Call add(r, t, products) for the products of a chunk of R rows with T tokens.
template <int P, int R, int T, class Part, class Add>
OPWEAVE_INLINE void each_product(const uint8_t* const (&weights)[R],
                                                        int64_t chunk, const Tokens<P>& x,
                                                        Part part, Add add) {
  OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
    const uint8_t* from = weights[r] + chunk * (kChunk / 2);
    if constexpr (R == kStreams) prefetch(from + Tuning::kLowBitStreamAhead, kChunk / 2);
    const ChunkWeights<P> numbers(load_packed(from, part));
    OPWEAVE_UNROLL for (int t = 0; t < T; ++t) add(r, t, chunk_products(x.at(t, chunk), numbers));
  }
}

template <int P, int R, int T>
class RowProducts {
 public:
  RowProducts(Rows rows, const char* x, const OpweaveLinearW4& call, const ScaleLayout& layout)
      : rows_(rows),
        weight_(call.weight),
        layout_(layout),
        x_{token_chunks<P>(x), call.kept->stride},
        sums_(group_sums<P>(x, weight_.width)) {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      q_[r] = weight_.q + rows[r] * weight_.q_stride;
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) totals_[r][t] = splat(0);
    }
  }

  void run() {
    if (layout_.is_wide) {
      add_wide_groups();
    } else if (layout_.is_regular) {
      add_narrow_groups();
    } else {
      add_irregular_groups();
    }
    if (weight_.offset != nullptr) add_offsets();
  }

  Vec total(int r, int t) const { return totals_[r][t]; }

 private:
  // Chunks that lie in one group each.
  void add_wide_groups() {
    float scales[R][kScales];
    const int64_t groups = weight_.width / weight_.group;
    for (int64_t first = 0; first < groups; first += kScales) {
      const int64_t count = groups - first < kScales ? groups - first : kScales;
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
        load_scales(scales[r], weight_, rows_[r], first, count);
      }
      for (int64_t g = 0; g < count; ++g) add_wide_group(first + g, scales, g);
    }
  }

  void add_wide_group(int64_t group, const float (&scales)[R][kScales], int64_t place) {
    Vec sums[R][T];
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) sums[r][t] = splat(0);
    }
    const auto add_to = [&](int r, int t, Vec products) { sums[r][t] = add(sums[r][t], products); };
    const int64_t begin = group * weight_.group / kChunk;
    const int64_t whole = weight_.group / kChunk;
    for (int64_t chunk = begin; chunk < begin + whole; ++chunk) {
      each_product<P, R, T>(q_, chunk, x_, Full{}, add_to);
    }
    const int64_t rest = weight_.group % kChunk / 2;  // only if there is one group per row
    if (rest > 0) each_product<P, R, T>(q_, begin + whole, x_, Tail{rest}, add_to);
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      const Vec scale = splat(scales[r][place]);
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
        totals_[r][t] = fma(sums[r][t], scale, totals_[r][t]);
      }
    }
  }

  // Chunks with several groups: a vector has the scales of one or more of them.
  void add_narrow_groups() {
    const int64_t groups = weight_.width / weight_.group;
    int64_t g = 0;
    for (; g + kLanes <= groups; g += kLanes) add_few_groups(g, Full{});
    if (g < groups) add_few_groups(g, Tail{groups - g});
  }

  // Chunks of at most kLanes groups from the given one on.
  template <class Part>
  void add_few_groups(int64_t first, Part part) {
    Vec scales[R];
    Vec totals[R][T];  // local, so that they stay in registers
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) totals[r][t] = totals_[r][t];
    }
    load_scales_of_rows(scales, weight_, rows_, first, part);
    Spread spread(layout_.of_lane);
    const auto add_chunk = [&](int64_t chunk, auto part) __attribute__((always_inline)) {
      each_product<P, R, T>(q_, chunk, x_, part, [&](int r, int t, Vec products) {
        totals[r][t] = fma(products, spread.spread(scales[r]), totals[r][t]);
      });
      spread.advance(static_cast<int32_t>(layout_.per_chunk));
    };
    const int64_t begin = first * weight_.group / kChunk;
    const int64_t chunks = weight_.width / kChunk;
    const int64_t next = begin + kLanes / layout_.per_chunk;
    const int64_t end = next < chunks ? next : chunks;
    for (int64_t chunk = begin; chunk < end; ++chunk) add_chunk(chunk, Full{});
    const int64_t rest = weight_.width % kChunk / 2;
    if (rest > 0 && end == chunks && end < next) add_chunk(end, Tail{rest});
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) totals_[r][t] = totals[r][t];
    }
  }

  // Chunks with groups of any size: every lane has its own scale.
  void add_irregular_groups() {
    float scales[R][kScales + kLanes];
    const int64_t step = kScales / kLanes;
    const int64_t chunks = weight_.width / kChunk;
    for (int64_t first = 0; first * kChunk < weight_.width; first += step) {
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
        repeat_scales(scales[r], weight_, rows_[r], first * kLanes);
      }
      const auto add_chunk = [&](int64_t chunk, auto part) __attribute__((always_inline)) {
        const int64_t place = (chunk - first) * kLanes;
        each_product<P, R, T>(q_, chunk, x_, part, [&](int r, int t, Vec products) {
          totals_[r][t] =
              fma(products, Lanes<float>::load(scales[r] + place, Full{}), totals_[r][t]);
        });
      };
      const int64_t end = first + step < chunks ? first + step : chunks;
      for (int64_t chunk = first; chunk < end; ++chunk) add_chunk(chunk, Full{});
      const int64_t rest = weight_.width % kChunk / 2;
      if (rest > 0 && end == chunks && end < first + step) add_chunk(end, Tail{rest});
    }
  }

  // Add the difference of the offsets to -8 * scale, times the sums of the groups.
  void add_offsets() {
    float offsets[kScales];
    const int64_t groups = weight_.width / weight_.group;
    for (int64_t first = 0; first < groups; first += kScales) {
      const int64_t count = groups - first < kScales ? groups - first : kScales;
      for (int r = 0; r < R; ++r) {
        load_relative_offsets(offsets, weight_, rows_[r], first, count);
        for (int t = 0; t < T; ++t) {
          const char* sums = reinterpret_cast<const char*>(sums_ + first) + t * x_.stride;
          for_each_vec(count, [&](int64_t g, auto part) {
            totals_[r][t] = fma(Lanes<float>::load(offsets + g, part),
                                Lanes<float>::load(reinterpret_cast<const float*>(sums) + g, part),
                                totals_[r][t]);
          });
        }
      }
    }
  }

  Rows rows_;
  const OpweaveWeightW4& weight_;
  const ScaleLayout& layout_;
  Tokens<P> x_;
  const float* sums_;
  const uint8_t* q_[R];
  Vec totals_[R][T];
};

// The outputs of tokens of type T that became P parts.
template <class T, int P>
class LinearRows {
 public:
  explicit LinearRows(const OpweaveLinearW4& call)
      : outputs_(call), call_(call), layout_(call.weight) {}

  void run(int64_t begin, int64_t end) const {
    const int64_t length = (end - begin) / kStreams;
    for (int64_t n = begin; n < begin + length; ++n) each_token({n, length});
    // At most three rows, which few calls have: one token at a time saves a third of the code.
    for (int64_t n = begin + kStreams * length; n < end; ++n) {
      for (int64_t t = 0; t < call_.tokens; ++t) add<1, 1>({n, 0}, t);
    }
    replace_infinite(begin, end);
  }

 private:
  void each_token(Rows rows) const {
    int64_t t = 0;
    if constexpr (kTogether == 4) {
      for (; t + 4 <= call_.tokens; t += 4) add<kStreams, 4>(rows, t);
    }
    for (; t + 2 <= call_.tokens; t += 2) add<kStreams, 2>(rows, t);
    if (t < call_.tokens) add<kStreams, 1>(rows, t);
  }

  template <int R, int N>
  void add(Rows rows, int64_t first) const {
    RowProducts<P, R, N> products(rows, outputs_.token(first), call_, layout_);
    products.run();
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < N; ++t) outputs_.store(rows[r], first + t, products.total(r, t));
    }
  }

  // Compute the outputs of tokens with NaN or infinity, in float32.
  void replace_infinite(int64_t begin, int64_t end) const {
    outputs_.each_infinite([&](int64_t t, const T* x) {
      for (int64_t n = begin; n < end; ++n) {
        Vec total = splat(0);
        each_piece(call_.weight, n, [&](const float* weights, int64_t column, int64_t count) {
          for_each_vec(count, [&](int64_t i, auto part) {
            total = fma(Lanes<T>::load(x + column + i, part),
                        Lanes<float>::load(weights + i, part), total);
          });
        });
        outputs_.store(n, t, total);
      }
    });
  }

  PackedOutputs<T, OpweaveLinearW4> outputs_;
  const OpweaveLinearW4& call_;
  ScaleLayout layout_;
};

void linear_w4(int64_t begin, int64_t end, void* erased) {
  const OpweaveLinearW4& call = *static_cast<const OpweaveLinearW4*>(erased);
  with_storage(call.kept->dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.kept->is_int8) return LinearRows<T, kInt8>(call).run(begin, end);
    LinearRows<T, parts_of(T{})>(call).run(begin, end);
  });
}

template <class T>
void widen_row(T* to, const OpweaveWeightW4& weight, int64_t row) {
#if defined(OPWEAVE_LOOKS_UP_WEIGHTS)
  if (weight.group % kStored == 0) return look_up_columns(to, weight, row, 0, weight.width);
#endif
  each_piece(weight, row, [=](const float* weights, int64_t column, int64_t count) {
    for_each_vec(count, [=](int64_t i, auto part) {
      Lanes<T>::store(to + column + i, Lanes<float>::load(weights + i, part), part);
    });
  });
}

template <class T>
void widen_rows(int64_t begin, int64_t end, const OpweaveWidenW4& call) {
  T* to = static_cast<T*>(call.out) + begin * call.weight.width;
  for (int64_t n = begin; n < end; ++n, to += call.weight.width) widen_row(to, call.weight, n);
}

void widen_w4(int64_t begin, int64_t end, void* erased) {
  const OpweaveWidenW4& call = *static_cast<const OpweaveWidenW4*>(erased);
  if (call.out_dtype == OPWEAVE_BFLOAT16) return widen_rows<BFloat16>(begin, end, call);
  widen_rows<float>(begin, end, call);
}

#if defined(__AMX_BF16__)

// 4-bit weights for LinearTiles, rounded to bfloat16.
class GroupedWeights {
 public:
  static constexpr float kUnit = 1;

  explicit GroupedWeights(const OpweaveWeightW4& weight) : weight_(weight) {}

  void fetch(int64_t row, int64_t column, int64_t width) const {
    prefetch(weight_.q + row * weight_.q_stride + column / 2, width / 2);
  }
  void widen(BFloat16* to, int64_t row, int64_t column, int64_t width) const {
    look_up_columns(to, weight_, row, column, column + width);
  }

 private:
  const OpweaveWeightW4& weight_;
};

void linear_tiles(int64_t begin, int64_t end, void* erased) {
  const OpweaveManyW4& call = *static_cast<const OpweaveManyW4*>(erased);
  const LinearTiles<GroupedWeights> tiles(call.linear, GroupedWeights(call.weight));
  tiles.run<BFloat16>(begin, end);
}

constexpr OpweaveLinearMany kMany = many_by_tiles(linear_tiles);

#else

constexpr OpweaveLinearMany kMany = {};

#endif

int64_t token_bytes(OpweaveDtype dtype, int64_t width, int64_t group, int32_t is_int8) {
  return is_int8                    ? bytes_of_token<kInt8>(width, group)
         : dtype == OPWEAVE_FLOAT32 ? bytes_of_token<2>(width, group)
                                    : bytes_of_token<1>(width, group);
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveLowBitKernels, low_bit) = {
    token_bytes,
    run_for_type<KeepTokens, OpweaveLowBitTokens>,
    linear_w4,
    widen_w4,
    kMany,
};
