// Linear layers for many tokens with AVX2: a matrix product by panels, see Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication" (2008).
//
// A panel contains some columns of sixteen rows of weights in float32, column by column. It stays
// in the L1 cache while it is multiplied with groups of six tokens. Each element of a token is
// multiplied with two vectors of rows, which gives twelve sums in sixteen registers. Every output
// sums its products in the order of the columns, so it depends only on its own token and weights.
// Incomplete panels and groups are padded with zeros.
#pragma once

#include "kernels/linear.h"
#include "kernels/linear_outputs.h"
#include "kernels/prefetch.h"
#include "kernels/row_cursor.h"
#include "kernels/unroll.h"
#include "kernels/vec_dot.h"

namespace {

constexpr int kGroupTokens = 6;
constexpr int64_t kPanelRows = 2 * kLanes;
constexpr int64_t kPanelColumns = 256;
constexpr int64_t kGroupElements = kPanelColumns * kLanes;  // per block: one vector per column

// to[k * apart] = column k of up to kLanes rows.
template <class T, class Part>
inline void transpose_part(float* to, int64_t apart, const T* const (&rows)[kLanes], int64_t column,
                           Part part) {
  Vec v[kLanes];
  OPWEAVE_UNROLL for (int r = 0; r < kLanes; ++r) {
    v[r] = rows[r] == nullptr ? splat(0) : Lanes<T>::load(rows[r] + column, part);
  }
  transpose(v);
  OPWEAVE_UNROLL for (int k = 0; k < kLanes; ++k) {
    Lanes<float>::store(to + k * apart, v[k], Full{});
  }
}

// Transpose some columns, from `column` on. Null rows are zero.
template <class T>
inline void transpose_rows(float* to, int64_t apart, const T* const (&rows)[kLanes], int64_t column,
                           int64_t columns) {
  for_each_vec(columns, [=, &rows](int64_t k, auto part) {
    transpose_part(to + k * apart, apart, rows, column + k, part);
  });
}

inline int64_t columns_from(int64_t column, int64_t width) {
  return width - column < kPanelColumns ? width - column : kPanelColumns;
}

struct KeepPanels {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLinearTokens& call) {
    RowCursor row(call.rows, begin);
    char* out = static_cast<char*>(call.out);
    for (int64_t first = begin; first < end; first += kGroupTokens) {
      const T* tokens[kLanes] = {};
      for (int64_t t = 0; t < kGroupTokens && first + t < end; ++t, row.advance()) {
        tokens[t] = reinterpret_cast<const T*>(row.in(static_cast<const char*>(call.x), 1));
      }
      char* to = out;
      for (int64_t k = 0; k < call.width; k += kPanelColumns, to += call.stride) {
        transpose_rows(reinterpret_cast<float*>(to), kLanes, tokens, k,
                       columns_from(k, call.width));
      }
      out += kGroupElements * static_cast<int64_t>(sizeof(float));
    }
  }
};

// Add the products of a group of tokens with a panel to sums.
__attribute__((noinline)) void add_panel(float* sums, const float* tokens, const float* panel,
                                         int64_t columns) {
  Vec totals[kGroupTokens][2];
  OPWEAVE_UNROLL for (int t = 0; t < kGroupTokens; ++t) {
    OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) totals[t][i] = splat(0);
  }
  for (int64_t k = 0; k < columns; ++k, tokens += kLanes, panel += kPanelRows) {
    const Vec low = Lanes<float>::load(panel, Full{});
    const Vec high = Lanes<float>::load(panel + kLanes, Full{});
    OPWEAVE_UNROLL for (int t = 0; t < kGroupTokens; ++t) {
      const Vec token = splat(tokens[t]);
      totals[t][0] = fma(token, low, totals[t][0]);
      totals[t][1] = fma(token, high, totals[t][1]);
    }
  }
  OPWEAVE_UNROLL for (int t = 0; t < kGroupTokens; ++t) {
    OPWEAVE_UNROLL for (int i = 0; i < 2; ++i) {
      float* at = sums + t * kPanelRows + i * kLanes;
      Lanes<float>::store(at, add(Lanes<float>::load(at, Full{}), totals[t][i]), Full{});
    }
  }
}

template <class D>
class LinearPanels {
 public:
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveLinear& call) {
    LinearPanels(call).run_rows<T>(begin, end);
  }

 private:
  using W = typename D::Weight;

  explicit LinearPanels(const OpweaveLinear& call)
      : call_(call), groups_((call.tokens + kGroupTokens - 1) / kGroupTokens) {}

  template <class T>
  void run_rows(int64_t begin, int64_t end) const {
    alignas(64) float sums[(OPWEAVE_LINEAR_MANY_TOKENS + kGroupTokens) * kPanelRows];
    const int64_t count = groups_ * kGroupTokens * kPanelRows;
    for (int64_t n = begin; n < end; n += kPanelRows) {
      memset(sums, 0, static_cast<size_t>(count) * sizeof(float));
      const W* rows[2][kLanes] = {};
      for (int64_t r = 0; r < kPanelRows && n + r < end; ++r) {
        rows[r / kLanes][r % kLanes] =
            static_cast<const W*>(call_.weight) + (n + r) * call_.weight_stride;
      }
      for (int64_t k = 0; k < call_.width; k += kPanelColumns) add_columns(sums, rows, k);
      for (int64_t r = 0; r < kPanelRows && n + r < end; r += kLanes) {
        store<T>(sums + r, n + r, end - n - r < kLanes ? end - n - r : kLanes);
      }
    }
  }

  void add_columns(float* sums, const W* const (&rows)[2][kLanes], int64_t column) const {
    alignas(64) float panel[kPanelColumns * kPanelRows];
    const int64_t columns = columns_from(column, call_.width);
    for (int i = 0; i < 2; ++i) {
      transpose_rows(panel + i * kLanes, kPanelRows, rows[i], column, columns);
    }
    const auto* tokens = reinterpret_cast<const float*>(static_cast<const char*>(call_.x) +
                                                        column / kPanelColumns * call_.x_stride);
    const bool is_last = columns == call_.width - column;
    const W* next = is_last ? rows[0][0] + kPanelRows * call_.weight_stride
                            : rows[0][0] + column + kPanelColumns;
    for (int64_t g = 0; g < groups_; ++g) {
      fetch_rows(next, g * kPanelRows / groups_, (g + 1) * kPanelRows / groups_);
      add_panel(sums + g * kGroupTokens * kPanelRows, tokens + g * kGroupElements, panel, columns);
    }
  }

  // Prefetch some of the rows of the next panel.
  void fetch_rows(const W* weights, int64_t begin, int64_t end) const {
    constexpr int64_t kBytes = kPanelColumns * static_cast<int64_t>(sizeof(W));
    for (int64_t r = begin; r < end; ++r) prefetch(weights + r * call_.weight_stride, kBytes);
  }

  template <class T>
  void store(const float* sums, int64_t n, int64_t rows) const {
    const LinearOutputs<T> outputs(n, rows, kUnit<W>, call_);
    for (int64_t t = 0; t < call_.tokens; ++t, sums += kPanelRows) {
      outputs.store(t, Lanes<float>::load(sums, Full{}));
    }
  }

  const OpweaveLinear& call_;
  int64_t groups_;
};

}  // namespace
