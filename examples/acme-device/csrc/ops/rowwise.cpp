// Norms, activations, rotation: each row by itself.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../kernels/norm.h"
#include "../kernels/pointwise.h"
#include "checks.h"
#include "ops.h"

namespace acme {
namespace {

// Calls `run(weight)` with a pointer to T or to float, or with null.
template <class T, class Run>
void with_weight(const MaybeTensor& weight, const Tensor& x, Run run) {
  if (!weight) return run(static_cast<const T*>(nullptr));
  check("weight", *weight, x);
  check_shape("weight", *weight, x.sizes().slice(x.dim() - 1));
  if (weight->scalar_type() == at::kFloat) return run(weight->const_data_ptr<float>());
  check_dtype("weight", *weight, x.scalar_type());
  run(weight->const_data_ptr<T>());
}

int64_t rows(const Tensor& x) { return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1); }

}  // namespace

Tensor rms_norm(const Tensor& given, const MaybeTensor& weight, double epsilon) {
  const Tensor x = given.contiguous();
  check("x", x, x);
  Tensor out = at::empty_like(x);
  const int64_t n = x.size(-1);
  ACME_FLOATS(x.scalar_type(), "rms_norm", [&] {
    with_weight<scalar_t>(weight, x, [&](const auto* w) {
      for (int64_t r = 0; r < rows(x); ++r) {
        kernels::rms_norm(out.mutable_data_ptr<scalar_t>() + r * n,
                          x.const_data_ptr<scalar_t>() + r * n, w, float(epsilon), n);
      }
    });
  });
  // The result has the strides of what was given, as that of any function of single elements.
  if (given.is_contiguous()) return out;
  return at::empty_like(given).copy_(out);
}

void add_rms_norm_(Tensor& x, Tensor& residual, const MaybeTensor& weight, double epsilon) {
  check("x", x, x);
  check("residual", residual, x);
  check_dtype("residual", residual, x.scalar_type());
  check_shape("residual", residual, x.sizes());
  TORCH_CHECK(x.is_contiguous() && residual.is_contiguous(), "x and residual must be contiguous.");
  const int64_t n = x.size(-1);
  ACME_FLOATS(x.scalar_type(), "add_rms_norm_", [&] {
    with_weight<scalar_t>(weight, x, [&](const auto* w) {
      for (int64_t r = 0; r < rows(x); ++r) {
        kernels::add_rms_norm(x.mutable_data_ptr<scalar_t>() + r * n,
                              residual.mutable_data_ptr<scalar_t>() + r * n, w, float(epsilon), n);
      }
    });
  });
}

Tensor silu_and_mul(const Tensor& given) {
  const Tensor x = given.contiguous();
  check("x", x, x);
  TORCH_CHECK(x.size(-1) % 2 == 0, "the last dimension of x, ", x.size(-1), ", must be even.");
  auto sizes = x.sizes().vec();
  const int64_t n = sizes.back() /= 2;
  Tensor out = at::empty(sizes, x.options());
  ACME_FLOATS(x.scalar_type(), "silu_and_mul", [&] {
    for (int64_t r = 0; r < rows(x); ++r) {
      kernels::silu_and_mul(out.mutable_data_ptr<scalar_t>() + r * n,
                            x.const_data_ptr<scalar_t>() + r * 2 * n, n);
    }
  });
  return out;
}

Tensor scaled_residual(const Tensor& given, const Tensor& given_residual, double scale) {
  const Tensor x = given.contiguous(), residual = given_residual.contiguous();
  check("x", x, x);
  check("residual", residual, x);
  check_dtype("residual", residual, x.scalar_type());
  check_shape("residual", residual, x.sizes());
  Tensor out = at::empty_like(x);
  ACME_FLOATS(x.scalar_type(), "scaled_residual", [&] {
    kernels::scaled_residual(out.mutable_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                             residual.const_data_ptr<scalar_t>(), float(scale), x.numel());
  });
  return out;
}

namespace {

// Rotates `x`, (tokens, heads, head_size), in place. Negative positions count from the end.
void rotate(const char* name, Tensor& x, const Tensor& positions, const Tensor& table, bool neox) {
  check(name, x, x);
  check("positions", positions, x);
  check("cos_sin_cache", table, x);
  check_dtype("positions", positions, at::kLong);
  TORCH_CHECK(x.dim() == 3 && table.dim() == 2 && table.is_contiguous() &&
                  positions.is_contiguous() && positions.numel() == x.size(0),
              name, " must be (tokens, heads, head_size), positions (tokens,), and cos_sin_cache ",
              "(max_position, r), contiguous.");
  TORCH_CHECK(table.size(1) % 2 == 0 && table.size(1) <= x.size(2), "cos_sin_cache has rows of ",
              table.size(1), "; they must be even and at most the head size, ", x.size(2), ".");
  const int64_t* const places = positions.const_data_ptr<int64_t>();
  const bool wide = table.scalar_type() == at::kFloat;
  if (!wide) check_dtype("cos_sin_cache", table, x.scalar_type());
  ACME_FLOATS(x.scalar_type(), "rotate", [&] {
    const auto turn = [&](const auto* angles) {
      for (int64_t t = 0; t < x.size(0); ++t) {
        const int64_t row = places[t] < 0 ? places[t] + table.size(0) : places[t];
        TORCH_CHECK_INDEX(0 <= row && row < table.size(0), "position ", places[t],
                          " is not in the table of ", table.size(0), ".");
        for (int64_t h = 0; h < x.size(1); ++h) {
          kernels::rotate(x.mutable_data_ptr<scalar_t>() + t * x.stride(0) + h * x.stride(1),
                          angles + row * table.size(1), table.size(1) / 2, neox);
        }
      }
    };
    wide ? turn(table.const_data_ptr<float>()) : turn(table.const_data_ptr<scalar_t>());
  });
}

}  // namespace

void rotary_embedding_(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& table,
                       bool neox) {
  rotate("query", query, positions, table, neox);
  rotate("key", key, positions, table, neox);
}

}  // namespace acme
