// Linear layers with the blocks of GGUF files for few tokens, and widening of such weights; compiled
// once per instruction set.
//
// As in low_bit.cpp, the products are exact sums of integers, and rows of several streams are
// processed at once.
#include "kernels/gguf.h"

#include "kernels/gguf_blocks.h"
#include "kernels/gguf_steps.h"
#include "kernels/packed_outputs.h"
#include "kernels/prefetch.h"
#include "kernels/storage.h"
#include "kernels/table.h"

#if defined(__AMX_BF16__)
#include "kernels/isa/linear_tiles_amx.h"
#endif

namespace {

constexpr int kStreams = 4;
constexpr int kTogether = kLanes == 16 ? 4 : 2;  // tokens at once; limited by the registers

// The scales of the vectors of a unit.
template <int kScales>
struct UnitScales {
  OPWEAVE_INLINE explicit UnitScales(const float* of_unit) {
    if constexpr (kScales == 1) {
      for (int v = 0; v < kVectors; ++v) scale[v] = splat(of_unit[0]);
    } else if constexpr (kVectors > 1) {
      for (int v = 0; v < kVectors; ++v) scale[v] = splat(of_unit[2 * v / kVectors]);
    } else {
#if defined(__AVX512F__)
      scale[0] = two_halves(of_unit[0], of_unit[1]);
#endif
    }
  }

  Vec scale[kVectors];
};

template <class F, int P, int R, int T>
class GgufProducts {
 public:
  GgufProducts(int64_t row, int64_t apart, int64_t first_token, const OpweaveLinearGguf& call)
      : call_(call) {
    const OpweaveGgufWeight& weight = call.weight;
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
      blocks_[r] = weight.blocks + (row + r * apart) * weight.stride;
    }
    OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
      x_[t] = static_cast<const char*>(call.x) + (first_token + t) * call.kept->stride;
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) totals_[r][t] = splat(0);
    }
  }

  void run() {
    const int64_t count = call_.weight.width / (F::kUnits * kUnit32);
    for (int64_t block = 0; block < count; ++block) {
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) add_block(r, block);
    }
  }

  Vec total(int r, int t) const { return totals_[r][t]; }

 private:
  TokenUnits<P> token(int t) const { return TokenUnits<P>(x_[t], call_.weight.width); }

  OPWEAVE_INLINE void add_block(int r, int64_t block) {
    const uint8_t* from = blocks_[r] + block * F::kBytes;
    if constexpr (R == kStreams) prefetch(from + Tuning::kLowBitStreamAhead, F::kBytes);
    Factors factors;
    F::load(factors, from);
    each_index<F::kUnits>([&](auto u) __attribute__((always_inline)) {
      constexpr int kU = decltype(u)::value;
      Unit weights;
      F::template unit<kU>(weights, from);
      const UnitScales<F::kScales> scale(factors.of + kU * F::kScales);
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
        add_unit(totals_[r][t], weights, scale, token(t), block * F::kUnits + kU);
      }
    });
    if constexpr (F::kHasOffsets) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
        add_offsets(totals_[r][t], factors, token(t).sums, block);
      }
    }
  }

  OPWEAVE_INLINE static void add_offsets(Vec& total, const Factors& factors, const float* sums,
                                         int64_t block) {
    if constexpr (F::kUnits == 1) {
      const Vec sum = Lanes<float>::load(sums + TokenUnits<P>::place_of_sum(block), Tail{1});
      total = fma(splat(factors.of[8]), sum, total);
    } else {
      OPWEAVE_UNROLL for (int i = kLanes == 16 ? 0 : 8; i < 16; i += kLanes) {
        total = fma(Lanes<float>::load(factors.of + i, Full{}),
                    Lanes<float>::load(sums + 16 * block + i, Full{}), total);
      }
    }
  }

  OPWEAVE_INLINE static void add_unit(Vec& total, const Unit& weights,
                                      const UnitScales<F::kScales>& scale,
                                      const TokenUnits<P>& token, int64_t unit) {
    const Vec of_x = splat(token.scales[unit]);
    OPWEAVE_UNROLL for (int v = 0; v < kVectors; ++v) {
      Vec products = to_float(
          add_products(Sums32{}, load_words16(token.units[unit].numbers[0] + 2 * v * kLanes),
                       weights[v]));
      if constexpr (P == 2) {
        const Sums32 low = add_products(
            Sums32{}, load_words16(token.units[unit].numbers[1] + 2 * v * kLanes), weights[v]);
        products = fma(to_float(low), splat(0x1p-15f), products);
      }
      total = fma(mul(products, of_x), scale.scale[v], total);
    }
  }

  const OpweaveLinearGguf& call_;
  const uint8_t* blocks_[R];
  const char* x_[T];
  Vec totals_[R][T];
};

// How tokens are packed for a format, and multiplied.
template <class F, int P, class Steps = typename StepsOf<F, P == kInt8>::type>
struct Packing {
  template <int R, int T>
  using Products = StepProducts<Steps, P, R, T>;

  template <class T>
  static void pack(char* out, const T* x, int64_t width) {
    pack_steps<Steps, P>(out, x, width);
  }
  static int64_t bytes(int64_t width) { return TokenSteps<Steps, P>::bytes(width); }
};

template <class F, int P>
struct Packing<F, P, void> {
  template <int R, int T>
  using Products = GgufProducts<F, P, R, T>;

  template <class T>
  static void pack(char* out, const T* x, int64_t width) {
    pack_units<P>(out, x, width);
  }
  static int64_t bytes(int64_t width) { return TokenUnits<P>::bytes(width); }
};

struct KeepGgufTokens {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveGgufTokens& call) {
    with_format(call.format, [&](auto format) {
      RowCursor row(call.rows, begin);
      char* out = static_cast<char*>(call.out);
      for (int64_t r = begin; r < end; ++r, row.advance(), out += call.stride) {
        const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
        if (call.is_int8) {
          Packing<decltype(format), kInt8>::pack(out, x, call.width);
        } else {
          Packing<decltype(format), parts_of(T{})>::pack(out, x, call.width);
        }
      }
    });
  }
};

// The outputs of tokens of type T that became P parts.
template <class T, class F, int P>
class GgufRows {
 public:
  explicit GgufRows(const OpweaveLinearGguf& call) : outputs_(call), call_(call) {}

  void run(int64_t begin, int64_t end) const {
    const int64_t length = (end - begin) / kStreams;
    for (int64_t n = begin; n < begin + length; ++n) each_token(n, length);
    // At most three rows, which few calls have: one token at a time saves a third of the code.
    for (int64_t n = begin + kStreams * length; n < end; ++n) {
      for (int64_t t = 0; t < call_.tokens; ++t) add<1, 1>(n, 0, t);
    }
    replace_infinite(begin, end);
  }

 private:
  void each_token(int64_t row, int64_t apart) const {
    int64_t t = 0;
    if constexpr (kTogether == 4) {
      for (; t + 4 <= call_.tokens; t += 4) add<kStreams, 4>(row, apart, t);
    }
    for (; t + 2 <= call_.tokens; t += 2) add<kStreams, 2>(row, apart, t);
    if (t < call_.tokens) add<kStreams, 1>(row, apart, t);
  }

  template <int R, int N>
  void add(int64_t row, int64_t apart, int64_t first) const {
    typename Packing<F, P>::template Products<R, N> products(row, apart, first, call_);
    products.run();
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < N; ++t) outputs_.store(row + r * apart, first + t, products.total(r, t));
    }
  }

  // Compute the outputs of tokens with NaN or infinity, in float32.
  void replace_infinite(int64_t begin, int64_t end) const {
    constexpr int64_t kColumns = F::kUnits * kUnit32;
    outputs_.each_infinite([&](int64_t t, const T* x) {
      for (int64_t n = begin; n < end; ++n) {
        Vec total = splat(0);
        const uint8_t* block = call_.weight.blocks + n * call_.weight.stride;
        for (int64_t c = 0; c < call_.weight.width; c += kColumns, block += F::kBytes) {
          alignas(64) float weights[kColumns];
          widen_block<F>(weights, block);
          for_each_vec(kColumns, [&](int64_t i, auto part) {
            total = fma(Lanes<T>::load(x + c + i, part), Lanes<float>::load(weights + i, part),
                        total);
          });
        }
        outputs_.store(n, t, total);
      }
    });
  }

  PackedOutputs<T, OpweaveLinearGguf> outputs_;
  const OpweaveLinearGguf& call_;
};

void linear_gguf(int64_t begin, int64_t end, void* erased) {
  const OpweaveLinearGguf& call = *static_cast<const OpweaveLinearGguf*>(erased);
  with_storage(call.kept->dtype, [&](auto storage) {
    with_format(call.weight.format, [&](auto format) {
      using T = decltype(storage);
      if (call.kept->is_int8) return GgufRows<T, decltype(format), kInt8>(call).run(begin, end);
      GgufRows<T, decltype(format), parts_of(T{})>(call).run(begin, end);
    });
  });
}

// Write `count` weights of a row of blocks.
template <class F, class T>
inline void widen_blocks(T* to, const uint8_t* block, int64_t count) {
  constexpr int64_t kColumns = F::kUnits * kUnit32;
  for (int64_t c = 0; c < count; c += kColumns, block += F::kBytes) widen_block<F>(to + c, block);
}

template <class T, class F>
void widen_rows(int64_t begin, int64_t end, const OpweaveWidenGguf& call) {
  const OpweaveGgufWeight& weight = call.weight;
  T* to = static_cast<T*>(call.out) + begin * weight.width;
  for (int64_t n = begin; n < end; ++n, to += weight.width) {
    widen_blocks<F>(to, weight.blocks + n * weight.stride, weight.width);
  }
}

void widen_gguf(int64_t begin, int64_t end, void* erased) {
  const OpweaveWidenGguf& call = *static_cast<const OpweaveWidenGguf*>(erased);
  with_format(call.weight.format, [&](auto format) {
    using F = decltype(format);
    if (call.out_dtype == OPWEAVE_BFLOAT16) return widen_rows<BFloat16, F>(begin, end, call);
    widen_rows<float, F>(begin, end, call);
  });
}

#if defined(__AMX_BF16__)

// Blocks for LinearTiles, rounded to bfloat16.
template <class F>
class BlockWeights {
 public:
  static constexpr float kUnit = 1;

  explicit BlockWeights(const OpweaveGgufWeight& weight) : weight_(weight) {}

  void fetch(int64_t row, int64_t column, int64_t width) const {
    prefetch(at(row, column), width / kColumns * F::kBytes);
  }
  void widen(BFloat16* to, int64_t row, int64_t column, int64_t width) const {
    widen_blocks<F>(to, at(row, column), width);
  }

 private:
  static constexpr int64_t kColumns = F::kUnits * kUnit32;

  const uint8_t* at(int64_t row, int64_t column) const {
    return weight_.blocks + row * weight_.stride + column / kColumns * F::kBytes;
  }

  const OpweaveGgufWeight& weight_;
};

void linear_tiles(int64_t begin, int64_t end, void* erased) {
  const OpweaveManyGguf& call = *static_cast<const OpweaveManyGguf*>(erased);
  with_format(call.weight.format, [&](auto format) {
    using Weights = BlockWeights<decltype(format)>;
    LinearTiles<Weights>(call.linear, Weights(call.weight)).template run<BFloat16>(begin, end);
  });
}

constexpr OpweaveLinearMany kMany = many_by_tiles(linear_tiles);

#else

constexpr OpweaveLinearMany kMany = {};

#endif

int64_t block_columns(OpweaveGgufFormat format) {
  int64_t columns = 0;
  with_format(format, [&](auto f) { columns = decltype(f)::kUnits * kUnit32; });
  return columns;
}

int64_t block_bytes(OpweaveGgufFormat format) {
  int64_t bytes = 0;
  with_format(format, [&](auto f) { bytes = decltype(f)::kBytes; });
  return bytes;
}

int64_t token_bytes(OpweaveDtype dtype, int64_t width, OpweaveGgufFormat format,
                    int32_t is_int8) {
  int64_t bytes = 0;
  with_format(format, [&](auto f) {
    using F = decltype(f);
    bytes = is_int8                    ? Packing<F, kInt8>::bytes(width)
            : dtype == OPWEAVE_FLOAT32 ? Packing<F, 2>::bytes(width)
                                       : Packing<F, 1>::bytes(width);
  });
  return bytes;
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveGgufKernels, gguf) = {
    block_columns, block_bytes, token_bytes, run_for_type<KeepGgufTokens, OpweaveGgufTokens>,
    linear_gguf,   widen_gguf,  kMany,
};
