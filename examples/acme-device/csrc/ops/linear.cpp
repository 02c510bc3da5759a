// Products with weights, as checkpoints have them and in tiles; and the lookup of rows.

#include <ATen/ops/empty.h>

#include <cstring>

#include "../kernels/linear.h"
#include "checks.h"
#include "ops.h"

namespace acme {
namespace {

template <class T>
const T* data_or_null(const MaybeTensor& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

// An empty (..., out_features) for the rows of `x`; checks the bias, which must fit it.
Tensor result(const Tensor& x, int64_t out_features, const MaybeTensor& bias) {
  if (bias) {
    check("bias", *bias, x);
    check_dtype("bias", *bias, x.scalar_type());
    check_shape("bias", *bias, {out_features});
  }
  auto sizes = x.sizes().vec();
  sizes.back() = out_features;
  return at::empty(sizes, x.options());
}

int64_t rows(const Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

}  // namespace

Tensor linear(const Tensor& given, const Tensor& given_weight, const MaybeTensor& bias) {
  const Tensor x = given.contiguous(), weight = given_weight.contiguous();
  check("x", x, x);
  check("weight", weight, x);
  check_dtype("weight", weight, x.scalar_type());
  check_shape("weight", weight, {weight.size(0), x.size(-1)});
  Tensor out = result(x, weight.size(0), bias);
  ACME_FLOATS(x.scalar_type(), "linear", [&] {
    kernels::linear(out.mutable_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                    weight.const_data_ptr<scalar_t>(), data_or_null<scalar_t>(bias), rows(x),
                    x.size(-1), weight.size(0));
  });
  return out;
}

// tiles: (tiles, in, kTile), in which tile t has the weights of outputs t * kTile and on.
Tensor tiled_linear(const Tensor& given, const Tensor& tiles, int64_t out_features,
                    const MaybeTensor& bias) {
  const Tensor x = given.contiguous();
  check("x", x, x);
  check("tiles", tiles, x);
  check_dtype("tiles", tiles, x.scalar_type());
  TORCH_CHECK(tiles.is_contiguous(), "tiles must be contiguous.");
  check_shape("tiles", tiles, {(out_features + kernels::kTile - 1) / kernels::kTile, x.size(-1),
                               kernels::kTile});
  Tensor out = result(x, out_features, bias);
  ACME_FLOATS(x.scalar_type(), "tiled_linear", [&] {
    kernels::tiled_linear(out.mutable_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                          tiles.const_data_ptr<scalar_t>(), data_or_null<scalar_t>(bias), rows(x),
                          x.size(-1), out_features);
  });
  return out;
}

namespace {

template <class Index>
void gather(const Tensor& out, const Tensor& ids, const Tensor& weight) {
  const Index* const rows = ids.const_data_ptr<Index>();
  const std::size_t bytes = weight.size(1) * weight.element_size();
  auto* const to = static_cast<char*>(out.mutable_data_ptr());
  const auto* const from = static_cast<const char*>(weight.const_data_ptr());
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= rows[i] && rows[i] < weight.size(0), "id ", rows[i],
                      " is not in the vocabulary of ", weight.size(0), ".");
    std::memcpy(to + i * bytes, from + rows[i] * bytes, bytes);
  }
}

}  // namespace

Tensor embedding(const Tensor& given_ids, const Tensor& given_weight) {
  const Tensor ids = given_ids.contiguous(), weight = given_weight.contiguous();
  check("weight", weight, weight);
  check("input_ids", ids, weight);
  TORCH_CHECK(weight.dim() == 2, "weight must be (vocabulary, hidden).");
  auto sizes = ids.sizes().vec();
  sizes.push_back(weight.size(1));
  Tensor out = at::empty(sizes, weight.options());
  if (ids.scalar_type() == at::kInt) {
    gather<int>(out, ids, weight);
  } else {
    check_dtype("input_ids", ids, at::kLong);
    gather<int64_t>(out, ids, weight);
  }
  return out;
}

}  // namespace acme
