// Linear maps of few tokens, compiled once per instruction set.
//
// With few tokens, reading the weights is the work. They are read in blocks of one row per lane,
// each cache line once for all tokens. Every output has one vector of partial sums, which takes the
// products in the order of the columns; its lanes are added at the end, in one order. So the bits of
// an output depend on its own token and weights only: not on other tokens, blocks or threads.
#include "kernels/linear.h"

#include "kernels/row_cursor.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_bytes.h"
#include "kernels/vec_reduce.h"

namespace {

constexpr int64_t kRows = kLanes;  // of a block
constexpr int kTokens = kLanes == 16 ? 4 : 2;  // whose sums with four rows fit the registers
constexpr int64_t kColumns = 256;  // of a tile: with kRows rows, it stays in the L1 cache
constexpr int64_t kCacheLine = 64;
constexpr int64_t kAhead = 64 * kCacheLine;  // enough to hide the latency of memory

static_assert(OPWEAVE_LINEAR_ALIGNMENT % kLanes == 0);

#define OPWEAVE_UNROLL _Pragma("GCC unroll 16")

struct WidenRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveWiden& call) {
    RowCursor row(call.rows, begin);
    float* out = call.out;
    for (int64_t r = begin; r < end; ++r, row.advance(), out += call.stride) {
      const T* x = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
      for_each_vec(call.width, [=](int64_t i, auto part) {
        Lanes<float>::store(out + i, Lanes<T>::load(x + i, part), Full{});  // zeros past the end
      });
    }
  }
};

// Sums of one token with the rows of a block.
struct Sums {
  Vec rows[kRows];
};

// Some columns of a block of weights and of the tokens. `ahead` is the distance in bytes from a
// weight to what is fetched into the cache when it is read.
template <class W>
struct Columns {
  const W* weights;
  int64_t weight_stride;
  const float* x;
  int64_t x_stride;
  int64_t width;
  int64_t ahead;

  Columns from(int64_t column) const {
    return {weights + column, weight_stride, x + column, x_stride, width - column, ahead};
  }
};

template <class W>
inline void load_weights(Vec (&to)[1], const W* from, Full) {
  to[0] = Lanes<W>::load(from, Full{});
}

template <class W>
inline void load_weights(Vec (&to)[1], const W* from, Tail tail) {
  to[0] = Lanes<W>::load(from, tail);
}

template <class W>
inline void load_weights(Vec (&to)[2], const W* from, Full) {
  load_two(to, from);
}

// totals += products of R rows and T tokens in V vectors of columns. Inlined and unrolled, so that
// the totals stay in registers.
template <int V, int R, int T, class W, class Part>
__attribute__((always_inline)) inline void add_product(Vec (&totals)[T][R], const Columns<W>& c,
                                                       int64_t column, Part part) {
  Vec tokens[T][V];
  OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
    OPWEAVE_UNROLL for (int v = 0; v < V; ++v) {
      const float* x = c.x + t * c.x_stride + column + v * kLanes;
      tokens[t][v] = Lanes<float>::load(x, Full{});
    }
  }
  OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
    Vec weights[V];
    load_weights(weights, c.weights + r * c.weight_stride + column, part);
    OPWEAVE_UNROLL for (int v = 0; v < V; ++v) {
      OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
        totals[t][r] = fma(weights[v], tokens[t][v], totals[t][r]);
      }
    }
  }
}

// The same for `steps` times `kWidth` columns; the first row is `row` of the sums.
template <int R, int T, int kWidth, bool kFetches, class W, class Part>
inline void add_steps(Sums* sums, int64_t row, const Columns<W>& c, int64_t steps, Part part) {
  constexpr int kVectors = kWidth >= 2 * kLanes ? 2 : 1;
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(W));
  Vec totals[T][R];
  OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) totals[t][r] = sums[t].rows[row + r];
  }
  for (int64_t i = 0; i < steps * kWidth; i += kWidth) {
    if constexpr (kFetches) {
      const char* ahead = reinterpret_cast<const char*>(c.weights + i) + c.ahead;
      OPWEAVE_UNROLL for (int r = 0; r < R; ++r) {
        for (int64_t line = 0; line < kWidth * kSize; line += kCacheLine) {
          // Into the L2 cache, which can wait for more lines at once than the L1 can.
          __builtin_prefetch(ahead + r * c.weight_stride * kSize + line, 0, 2);
        }
      }
    }
    OPWEAVE_UNROLL for (int k = 0; k < kWidth; k += kVectors * kLanes) {
      add_product<kVectors>(totals, c, i + k, part);
    }
  }
  OPWEAVE_UNROLL for (int t = 0; t < T; ++t) {
    OPWEAVE_UNROLL for (int r = 0; r < R; ++r) sums[t].rows[row + r] = totals[t][r];
  }
}

// The same for all columns. Each loop has the totals in registers of its own.
template <int R, int T, bool kFetches, class W>
inline void add_columns(Sums* sums, int64_t row, const Columns<W>& c) {
  constexpr int kLine = static_cast<int>(kCacheLine / sizeof(W));
  constexpr int kWidth = kLine > 2 * kLanes ? kLine : 2 * kLanes;
  const int64_t whole = c.width / kWidth;
  add_steps<R, T, kWidth, kFetches>(sums, row, c, whole, Full{});
  Columns<W> rest = c.from(whole * kWidth);
  if (rest.width >= kLanes) {
    const int64_t vectors = rest.width / kLanes;
    add_steps<R, T, kLanes, false>(sums, row, rest, vectors, Full{});
    rest = rest.from(vectors * kLanes);
  }
  if (rest.width > 0) add_steps<R, T, kLanes, false>(sums, row, rest, 1, Tail{rest.width});
}

// The same for all rows from `row` on: R at once, then half as many, and so on.
template <int R, int T, class W>
inline void add_rows(Sums* sums, int64_t row, int64_t rows, const Columns<W>& all) {
  for (; row + R <= rows; row += R) {
    Columns<W> c = all;
    c.weights += row * c.weight_stride;
    if (c.ahead == 0) {
      add_columns<R, T, false>(sums, row, c);
      continue;
    }
    // The last columns of these rows are followed by the first ones of the next rows.
    const int64_t size = static_cast<int64_t>(sizeof(W));
    const int64_t early = c.width - c.ahead / size;
    const int64_t last = early > 0 ? early / kLanes * kLanes : 0;  // whole vectors, as ever
    Columns<W> rest = c.from(last);
    rest.ahead += (R * c.weight_stride - c.width) * size;
    c.width = last;
    add_columns<R, T, true>(sums, row, c);
    add_columns<R, T, true>(sums, row, rest);
  }
  if constexpr (R > 1) {
    if (row < rows) add_rows<R / 2, T>(sums, row, rows, all);
  }
}

// The same for T tokens or fewer.
template <int T, class W>
inline void add_tokens(Sums* sums, int64_t tokens, int64_t rows, const Columns<W>& c) {
  if constexpr (T > 1) {
    if (tokens < T) return add_tokens<T - 1>(sums, tokens, rows, c);
  }
  // Each row is a stream from memory, and few streams are faster than many; but with fewer rows than
  // this, sums would wait for one another.
  add_rows<(T == 1 && sizeof(W) == 2 ? 2 : 4), T>(sums, 0, rows, c);
}

template <class W>
struct LinearRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLinear& call) {
    for (int64_t n = begin; n < end; n += kRows) {
      Sums sums[OPWEAVE_LINEAR_TOKENS];
      const int64_t rows = end - n < kRows ? end - n : kRows;
      for (int64_t t = 0; t < call.tokens; ++t) {
        for (Vec& row : sums[t].rows) row = splat(0);
      }
      const Columns<W> all{static_cast<const W*>(call.weight) + n * call.weight_stride,
                           call.weight_stride, call.x, call.x_stride, call.width, kAhead};
      if (call.tokens <= kTokens) {
        add_tokens<kTokens>(sums, call.tokens, rows, all);
      } else {
        add_tiles(sums, call.tokens, rows, all);
      }
      store<T>(sums, n, rows, call);
    }
  }

 private:
  // Many tokens: a tile of the weights is widened once, and stays in the cache for all of them.
  static void add_tiles(Sums* sums, int64_t tokens, int64_t rows, const Columns<W>& all) {
    alignas(64) float wide[kRows * kColumns];
    for (int64_t k = 0; k < all.width; k += kColumns) {
      Columns<W> tile = all.from(k);
      tile.ahead = 0;
      if (tile.width > kColumns) tile.width = kColumns;
      if constexpr (sizeof(W) == sizeof(float)) {
        add_tile(sums, tokens, rows, tile);
      } else {
        for (int64_t r = 0; r < rows; ++r) {
          widen_row(wide + r * kColumns, tile.weights + r * tile.weight_stride, tile.width);
        }
        add_tile(sums, tokens, rows,
                 Columns<float>{wide, kColumns, tile.x, tile.x_stride, tile.width, 0});
      }
    }
  }

  static void widen_row(float* to, const W* from, int64_t count) {
    for_each_vec(count, [=](int64_t i, auto part) {
      Lanes<float>::store(to + i, Lanes<W>::load(from + i, part), Full{});
    });
  }

  template <class V>
  static void add_tile(Sums* sums, int64_t tokens, int64_t rows, Columns<V> tile) {
    for (int64_t t = 0; t < tokens; t += kTokens, tile.x += kTokens * tile.x_stride) {
      add_tokens<kTokens>(sums + t, tokens - t, rows, tile);
    }
  }

  template <class T>
  static void store(const Sums* totals, int64_t n, int64_t rows, const OpweaveLinear& call) {
    const Tail part{rows};
    Vec scale = splat(kUnit<W>);
    if (call.scale != nullptr) {
      scale = mul(scale, call.scale_stride == 0 ? splat(*call.scale)
                                                : Lanes<float>::load(call.scale + n, part));
    }
    const Vec bias = bias_of<T>(n, part, call);
    T* out = static_cast<T*>(call.out) + n;
    for (int64_t t = 0; t < call.tokens; ++t, out += call.out_features) {
      Vec y = mul(sums(totals[t].rows), scale);
      if (call.bias != nullptr) y = add(y, bias);
      if (rows == kRows) {
        Lanes<T>::store(out, y, Full{});
      } else {
        Lanes<T>::store(out, y, part);
      }
    }
  }

  template <class T>
  static Vec bias_of(int64_t n, Tail part, const OpweaveLinear& call) {
    if (call.bias == nullptr) return splat(0);
    if (call.bias_dtype == OPWEAVE_FLOAT32) {
      return Lanes<float>::load(static_cast<const float*>(call.bias) + n, part);
    }
    return Lanes<T>::load(static_cast<const T*>(call.bias) + n, part);
  }
};

void linear_rows(int64_t begin, int64_t end, void* erased) {
  const OpweaveLinear& call = *static_cast<const OpweaveLinear*>(erased);
  with_storage(call.dtype, [&](auto storage) {
    using T = decltype(storage);
    switch (call.weight_dtype) {
      case OPWEAVE_INT8: return LinearRows<int8_t>::run<T>(begin, end, call);
      case OPWEAVE_FLOAT8_E4M3FN: return LinearRows<Float8>::run<T>(begin, end, call);
      default: return LinearRows<T>::template run<T>(begin, end, call);  // that of x
    }
  });
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveLinearKernels, linear) = {
    run_for_type<WidenRows, OpweaveWiden>,
    linear_rows,
};
