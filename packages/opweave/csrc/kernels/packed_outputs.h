// The outputs of linear layers whose tokens are packed as integers.
#pragma once

#include "kernels/packed_numbers.h"
#include "kernels/row_cursor.h"

namespace {

// The outputs of a call with tokens of type T.
template <class T, class Call>
class PackedOutputs {
 public:
  explicit PackedOutputs(const Call& call) : call_(call) {}

  // A packed token.
  const char* token(int64_t t) const {
    return static_cast<const char*>(call_.x) + t * call_.kept->stride;
  }

  // Store the output of token t and row n of the weight, and add the bias.
  void store(int64_t n, int64_t t, Vec total) const {
    float y = sum(total);
    if (call_.bias != nullptr) y += bias(n);
    Lanes<T>::store(static_cast<T*>(call_.out) + t * call_.out_features + n, splat(y), Tail{1});
  }

  // Call visit(t, x) for the tokens with NaN or infinity, which cannot be packed.
  template <class Visit>
  void each_infinite(Visit visit) const {
    for (int64_t t = 0; t < call_.tokens; ++t) {
      if (reinterpret_cast<const TokenHeader*>(token(t))->is_finite) continue;
      const RowCursor row(call_.kept->rows, call_.first_token + t);
      visit(t, reinterpret_cast<const T*>(row.in(static_cast<const char*>(call_.kept->x), 1)));
    }
  }

 private:
  float bias(int64_t n) const {
    if (call_.bias_dtype == OPWEAVE_FLOAT32) return static_cast<const float*>(call_.bias)[n];
    return sum(Lanes<T>::load(static_cast<const T*>(call_.bias) + n, Tail{1}));
  }

  const Call& call_;
};

}  // namespace
