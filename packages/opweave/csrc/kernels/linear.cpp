// Linear layers for few tokens, and widening of weights; compiled once per instruction set. Kernels
// for many tokens are in isa/linear_panels_avx2.h and isa/linear_tiles_amx.h.
//
// With few tokens, the kernels are bound by reading the weights. Blocks of weights, one row per
// lane, are read once for all tokens. Several blocks are read concurrently, each as a sequential
// stream of rows, because memory bandwidth is highest with several predictable streams. Every
// output has one vector of partial sums, which accumulates the products in the order of the
// columns; its lanes are added at the end in a fixed order. So an output depends only on its own
// token and weights, not on other tokens, blocks or threads.
#include "kernels/linear.h"

#include <type_traits>

#include "kernels/linear_outputs.h"
#include "kernels/prefetch.h"
#include "kernels/row_cursor.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/tuning.h"
#include "kernels/unroll.h"
#include "kernels/vec_dot.h"

#if defined(__AMX_BF16__)
#include "kernels/isa/linear_tiles_amx.h"
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define OPWEAVE_HAS_PANELS
#include "kernels/isa/linear_panels_avx2.h"
#endif

namespace {

constexpr int64_t kRows = kLanes;  // per block
constexpr int kTogether = 4;       // rows at once, with independent sums
constexpr int kTokens = kLanes == 16 ? 4 : 2;  // at once; limited by the registers for sums
constexpr int64_t kColumns = 256;  // per tile of kRows rows, which fits the L1 cache
constexpr int64_t kShortToken = 12 << 10;  // bytes
constexpr uintptr_t kLargePage = uintptr_t{2} << 20;

// Call visit with the Dot for tokens of type X and the weights of a call.
template <class X, class Visit>
inline void with_weights(OpweaveDtype dtype, Visit visit) {
  switch (dtype) {
    case OPWEAVE_INT8: return visit(FewDot<int8_t, X>{});
    case OPWEAVE_FLOAT8_E4M3FN: return visit(FewDot<Float8, X>{});
    default: return visit(Dot<X>{});  // weights other than 8-bit have the type of x
  }
}

struct KeepRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLinearTokens& call) {
    with_weights<T>(call.weight_dtype, [&](auto dot) {
      using D = decltype(dot);
      RowCursor row(call.rows, begin);
      char* out = static_cast<char*>(call.out);
      for (int64_t r = begin; r < end; ++r, row.advance(), out += call.stride) {
        D::keep(reinterpret_cast<typename D::Query*>(out),
                reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1)),
                call.width);
      }
    });
  }
};

// Some columns of weights and tokens.
template <class D>
struct Columns {
  using Query = typename D::Query;

  const typename D::Weight* weights;
  int64_t apart;     // stride between the rows processed at once, in elements
  const char* x;     // Query
  int64_t x_stride;  // in bytes
  int64_t width;
  int64_t ahead;  // prefetch distance in bytes, or 0

  Columns from(int64_t column) const {
    const int64_t bytes = column * static_cast<int64_t>(sizeof(Query));
    return {weights + column, apart, x + bytes, x_stride, width - column, ahead};
  }

  Columns at(int64_t row, int64_t stride) const {
    return {weights + row * stride, apart, x, x_stride, width, ahead};
  }

  const Query* token(int64_t t) const { return reinterpret_cast<const Query*>(x + t * x_stride); }
};

template <class D>
using Operand = decltype(D::query(nullptr));

template <class D, int V, class Part>
inline void load_weights(Operand<D> (&to)[V], const typename D::Weight* from, Part part) {
  if constexpr (V == 2 && sizeof(typename D::Query) == sizeof(float)) {
    load_two(to, from);
  } else {
    OPWEAVE_UNROLL for (int v = 0; v < V; ++v) to[v] = D::key(from + v * D::kWidth, part);
  }
}

// Add the products of R rows and T tokens in V steps of columns to totals. Inlined and unrolled, so
// that the totals stay in registers.
template <int V, int R, int T, class D, class Part>
__attribute__((always_inline)) inline void add_product(Vec (&totals)[T][R], const Columns<D>& c,
                                                       int64_t column, Part part) {
  Operand<D> tokens[T][V];
  OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
    OPWEAVE_UNROLL for (int v = 0; v < V; ++v) {
      tokens[t][v] = D::query(c.token(t) + column + v * D::kWidth);
    }
  }
  OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
    Operand<D> weights[V];
    load_weights<D>(weights, c.weights + r * c.apart + column, part);
    OPWEAVE_UNROLL for (int v = 0; v < V; ++v) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
        totals[t][r] = D::step(tokens[t][v], weights[v], totals[t][r]);
      }
    }
  }
}

// Add the products for `steps` times `kWidth` columns. total(t, r) returns the sum of token t with
// row r.
template <int R, int T, int kWidth, bool kFetches, class D, class Part, class Total>
inline void add_steps(const Columns<D>& c, int64_t steps, Part part, Total total) {
  constexpr int kVectors = kWidth >= 2 * D::kWidth ? 2 : 1;
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(*c.weights));
  Vec totals[T][R];
  OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) totals[t][r] = total(t, r);
  }
  for (int64_t i = 0; i < steps * kWidth; i += kWidth) {
    if constexpr (kFetches) {
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
        const char* weights = reinterpret_cast<const char*>(c.weights + r * c.apart + i);
        prefetch(weights + c.ahead, kWidth * kSize);
        if constexpr (Tuning::kStreamNear > 0) {
          prefetch_near(weights + Tuning::kStreamNear, kWidth * kSize);
        }
      }
    }
    OPWEAVE_UNROLL for (int k = 0; k < kWidth; k += kVectors * D::kWidth) {
      add_product<kVectors>(totals, c, i + k, part);
    }
  }
  OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) total(t, r) = totals[t][r];
  }
}

// Add the products for all columns. Each loop keeps the totals in registers.
template <int R, int T, bool kFetches, class D, class Total>
inline void add_columns(const Columns<D>& c, Total total) {
  constexpr int kStep = static_cast<int>(D::kWidth);
  constexpr int kLine = static_cast<int>(kCacheLine / sizeof(*c.weights));
  constexpr int kWidth = kLine > kStep ? kLine : kStep;
  const int64_t whole = c.width / kWidth;
  add_steps<R, T, kWidth, kFetches>(c, whole, Full{}, total);
  Columns<D> rest = c.from(whole * kWidth);
  if (rest.width >= kStep) {
    const int64_t steps = rest.width / kStep;
    add_steps<R, T, kStep, false>(rest, steps, Full{}, total);
    rest = rest.from(steps * kStep);
  }
  if (rest.width > 0) add_steps<R, T, kStep, false>(rest, 1, Tail{rest.width}, total);
}

// Add the products for `tokens` tokens, from kLeast to T.
template <int R, int T, bool kFetches, int kLeast = 1, class D, class Total>
inline void add_tokens(int64_t tokens, const Columns<D>& c, Total total) {
  if constexpr (T > kLeast) {
    if (tokens < T) return add_tokens<R, T - 1, kFetches, kLeast>(tokens, c, total);
  }
  add_columns<R, T, kFetches>(c, total);
}

// The sums of one token with the rows of a block.
struct Sums {
  Vec rows[kRows];
};

// Add all rows of a block from `row` on: R at once, then half as many, and so on. Inlined, so that
// constant strides are known.
template <int R, bool kFetches, int kLeast, class D>
__attribute__((always_inline)) inline void add_block(Sums* sums, int64_t tokens, int64_t row,
                                                     int64_t rows, const Columns<D>& block,
                                                     int64_t stride) {
  for (; row + R <= rows; row += R) {
    add_tokens<R, kTokens, kFetches, kLeast>(
        tokens, block.at(row, stride),
        [=](int token, int next) -> Vec& { return sums[token].rows[row + next]; });
  }
  if constexpr (R > 1) {
    if (row < rows) add_block<R / 2, kFetches, kLeast>(sums, tokens, row, rows, block, stride);
  }
}

// Add all rows of a tile, which stays in the cache for all tokens, of which there are more than
// kTokens. The first tokens prefetch the next tile, if there is a distance to it.
template <class D>
__attribute__((always_inline)) inline void add_tile(Sums* sums, int64_t tokens, int64_t rows,
                                                    const Columns<D>& tile) {
  int64_t t = 0;
  if (tile.ahead != 0) {
    add_block<kTogether, true, kTokens>(sums, kTokens, 0, rows, tile, tile.apart);
    t = kTokens;
  }
  for (; t < tokens; t += kTokens) {
    Columns<D> some = tile;
    some.x += t * tile.x_stride;
    add_block<kTogether, false, 1>(sums + t, tokens - t, 0, rows, some, tile.apart);
  }
}

// Add all rows of a tile of widened weights, kColumns apart; the types of weights share it.
template <class D>
__attribute__((noinline)) void add_widened_tile(Sums* sums, int64_t rows,
                                                const typename D::Weight* weights,
                                                const OpweaveLinear& call, const char* x,
                                                int64_t width) {
  add_tile(sums, call.tokens, rows, Columns<D>{weights, kColumns, x, call.x_stride, width, 0});
}

template <class D>
struct LinearRows {
  using Weight = typename D::Weight;
  using Query = typename D::Query;

  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLinear& call) {
    if (call.tokens <= kTokens) begin = add_all_streams<T>(begin, end, call);
    for (int64_t n = begin; n < end; n += kRows) {
      Sums sums[OPWEAVE_LINEAR_TOKENS];
      clear(sums, call.tokens);
      const int64_t rows = end - n < kRows ? end - n : kRows;
      const Columns<D> block = columns(n, call.weight_stride, 0, call);
      if (call.tokens <= kTokens) {
        add_block<kTogether, false, 1>(sums, call.tokens, 0, rows, block, call.weight_stride);
      } else {
        add_tiles(sums, rows, block, call);
      }
      store<T>(sums, n, rows, call);
    }
  }

 private:
  // Two streams are faster than eight if the weights are in huge pages, which avoid TLB misses, the
  // sums keep up with the memory, and the token, which is read four times as often, fits the L1
  // cache. Weights in explicitly allocated huge pages begin at a page boundary; other allocators
  // have a header there.
  static bool needs_two_streams(const OpweaveLinear& call) {
    return call.tokens == 1 && call.x_stride <= kShortToken &&
           reinterpret_cast<uintptr_t>(call.weight) % kLargePage == 0;
  }

  // Process the rows of as many streams as suit at most kTokens tokens. Returns the first remaining
  // row.
  template <class T>
  static int64_t add_all_streams(int64_t begin, int64_t end, const OpweaveLinear& call) {
    if constexpr (std::is_same_v<Weight, BFloat16>) {
      if (needs_two_streams(call)) return add_streams<T, 2, 1, 1>(begin, end, call);
    }
    if (call.tokens <= kTokens / 2) {
      return add_streams<T, 2 * kTogether, 1, kTokens / 2>(begin, end, call);
    }
    return add_streams<T, kTogether, kTokens / 2 + 1, kTokens>(begin, end, call);
  }

  static Columns<D> columns(int64_t row, int64_t apart, int64_t ahead, const OpweaveLinear& call) {
    return {static_cast<const Weight*>(call.weight) + row * call.weight_stride, apart,
            static_cast<const char*>(call.x), call.x_stride, call.width, ahead};
  }

  static void clear(Sums* sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      for (Vec& row : sums[i].rows) row = splat(0);
    }
  }

  // Process the rows of S consecutive streams for kLeast to kMost tokens. Returns the first
  // remaining row.
  template <class T, int S, int kLeast, int kMost>
  static int64_t add_streams(int64_t begin, int64_t end, const OpweaveLinear& call) {
    const int64_t length = (end - begin) / (S * kRows) * kRows;
    for (int64_t n = begin; n < begin + length; n += kRows) {
      Sums sums[S][kMost];
      for (Sums(&of_stream)[kMost] : sums) clear(of_stream, call.tokens);
      const Columns<D> first = columns(n, length * call.weight_stride, Tuning::kStreamAhead, call);
      for (int64_t row = 0; row < kRows; ++row) {
        add_tokens<S, kMost, true, kLeast>(
            call.tokens, first.at(row, call.weight_stride),
            [&](int token, int stream) -> Vec& { return sums[stream][token].rows[row]; });
      }
      for (int stream = 0; stream < S; ++stream) {
        store<T>(sums[stream], n + stream * length, kRows, call);
      }
    }
    return begin + S * length;
  }

  // With many tokens, a tile of the weights stays in the cache for all of them, widened if
  // necessary.
  static void add_tiles(Sums* sums, int64_t rows, const Columns<D>& block,
                        const OpweaveLinear& call) {
    constexpr int64_t kSize = static_cast<int64_t>(sizeof(Weight));
    alignas(64) Query wide[kRows * kColumns];
    for (int64_t k = 0; k < block.width; k += kColumns) {
      Columns<D> tile = block.from(k);
      if (tile.width > kColumns) {
        tile.width = kColumns;
        tile.ahead = kColumns * kSize;
      } else {
        tile.ahead = (kRows * tile.apart - k) * kSize;  // prefetch the start of the next block
      }
      if constexpr (sizeof(Weight) < sizeof(Query)) {
        for (int64_t r = 0; r < rows; ++r) {
          const Weight* weights = tile.weights + r * tile.apart;
          prefetch(reinterpret_cast<const char*>(weights) + tile.ahead, tile.width * kSize);
          D::widen(wide + r * kColumns, weights, tile.width);
        }
        add_widened_tile<Dot<Query>>(sums, rows, wide, call, tile.x, tile.width);
      } else {
        add_tile(sums, call.tokens, rows, tile);
      }
    }
  }

  template <class T>
  static void store(const Sums* totals, int64_t n, int64_t rows, const OpweaveLinear& call) {
    const LinearOutputs<T> outputs(n, rows, D::kUnit, call);
    for (int64_t t = 0; t < call.tokens; ++t) outputs.store(t, sums(totals[t].rows));
  }
};

// Call Rows<Dot>::run<T>(begin, end, call) for the types of a call.
template <template <class> class Rows>
void run_for_weights(int64_t begin, int64_t end, void* erased) {
  const OpweaveLinear& call = *static_cast<const OpweaveLinear*>(erased);
  with_storage(call.dtype, [&](auto storage) {
    using T = decltype(storage);
    with_weights<T>(call.weight_dtype, [&](auto dot) {
      Rows<decltype(dot)>::template run<T>(begin, end, call);
    });
  });
}

#if defined(__AMX_BF16__)

void linear_tiles(int64_t begin, int64_t end, void* erased) {
  const OpweaveLinear& call = *static_cast<const OpweaveLinear*>(erased);
  with_storage(call.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.weight_dtype == OPWEAVE_INT8) {
      LinearTiles<Weights8<int8_t>>(call, Weights8<int8_t>(call)).run<T>(begin, end);
    } else {
      LinearTiles<Weights8<Float8>>(call, Weights8<Float8>(call)).run<T>(begin, end);
    }
  });
}

constexpr OpweaveLinearMany kMany = {};
constexpr OpweaveLinearMany kManyW8 = many_by_tiles(linear_tiles);

#elif defined(OPWEAVE_HAS_PANELS)

int64_t bytes_of_panels(OpweaveDtype) {
  return kGroupElements * static_cast<int64_t>(sizeof(float));
}

constexpr OpweaveLinearMany kMany = {
    run_for_type<KeepPanels, OpweaveLinearTokens>,
    run_for_weights<LinearPanels>,
    kGroupTokens,
    kPanelColumns,
    bytes_of_panels,
};
constexpr OpweaveLinearMany kManyW8 = kMany;

#else

constexpr OpweaveLinearMany kMany = {};
constexpr OpweaveLinearMany kManyW8 = {};

#endif

// Rounds like the definition: weights are exact in float32; their products with scales are rounded.
template <class W>
void widen_weights(int64_t begin, int64_t end, const OpweaveWidenRows& call) {
  constexpr int64_t kTwo = 2 * kLanes;
  for (int64_t r = begin; r < end; ++r) {
    const W* from = static_cast<const W*>(call.weight) + r * call.weight_stride;
    float* to = call.out + r * call.width;
    const Vec scale = splat(call.scale[r * call.scale_stride]);
    const auto store = [=](int64_t i, Vec weights, auto part) {
      Lanes<float>::store(to + i, mul(mul(weights, splat(kUnit<W>)), scale), part);
    };
    const int64_t whole = call.width / kTwo * kTwo;
    for (int64_t i = 0; i < whole; i += kTwo) {
      Vec weights[2];
      load_two(weights, from + i);
      store(i, weights[0], Full{});
      store(i + kLanes, weights[1], Full{});
    }
    for_each_vec(call.width - whole, [=](int64_t i, auto part) {
      store(whole + i, Lanes<W>::load(from + whole + i, part), part);
    });
  }
}

void widen_rows(int64_t begin, int64_t end, void* erased) {
  const OpweaveWidenRows& call = *static_cast<const OpweaveWidenRows*>(erased);
  if (call.weight_dtype == OPWEAVE_INT8) return widen_weights<int8_t>(begin, end, call);
  widen_weights<Float8>(begin, end, call);
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveLinearKernels, linear) = {
    run_for_type<KeepRows, OpweaveLinearTokens>,
    run_for_weights<LinearRows>,
    widen_rows,
    kMany,
    kManyW8,
};
