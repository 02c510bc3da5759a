// Scale the sums of a linear layer, add the bias, and round once.
#pragma once

#include "kernels/linear.h"
#include "kernels/vec.h"

namespace {

// The outputs of up to kLanes rows of the weights, from row n on.
template <class T>
class LinearOutputs {
 public:
  LinearOutputs(int64_t n, int64_t rows, float unit, const OpweaveLinear& call)
      : out_(static_cast<T*>(call.out) + n),
        apart_(call.out_features),
        part_{rows},
        scale_(splat(unit)),
        has_bias_(call.bias != nullptr) {
    if (call.scale != nullptr) {
      scale_ = mul(scale_, call.scale_stride == 0 ? splat(*call.scale)
                                                  : Lanes<float>::load(call.scale + n, part_));
    }
    bias_ = bias_of(n, call);
  }

  void store(int64_t token, Vec sums) const {
    Vec y = mul(sums, scale_);
    if (has_bias_) y = add(y, bias_);
    T* out = out_ + token * apart_;
    if (part_.count == kLanes) {
      Lanes<T>::store(out, y, Full{});
    } else {
      Lanes<T>::store(out, y, part_);
    }
  }

 private:
  Vec bias_of(int64_t n, const OpweaveLinear& call) const {
    if (call.bias == nullptr) return splat(0);
    if (call.bias_dtype == OPWEAVE_FLOAT32) {
      return Lanes<float>::load(static_cast<const float*>(call.bias) + n, part_);
    }
    return Lanes<T>::load(static_cast<const T*>(call.bias) + n, part_);
  }

  T* out_;
  int64_t apart_;
  Tail part_;
  Vec scale_;
  Vec bias_;
  bool has_bias_;
};

}  // namespace
