// Quantization to 8 bits: argument checks, then the kernels.
#include <vector>

#include "kernels/quant.h"
#include "module/module.h"
#include "module/row_checks.h"

namespace opweave {
namespace {

void check_output(const View& out, const View& x) {
  check_quantized(out);
  check_same_sizes(out, x);
  check_disjoint(out, x);
}

int64_t row_count(const View& x) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < x.rank; ++d) rows *= x.sizes[d];
  return rows;
}

bool divides(int64_t part, int64_t whole) { return part == 0 ? whole == 0 : whole % part == 0; }

// The numbers of row blocks and column blocks with a scale each.
struct Blocks {
  int64_t rows;
  int64_t columns;
};

Blocks check_scale(const View& scale, const View& x) {
  check_dtype(scale, {OPWEAVE_FLOAT32});
  check_contiguous(scale);
  if (scale.element_count() == 1) return {1, 1};
  const int64_t rows = row_count(x);
  const int64_t columns = x.sizes[x.rank - 1];
  if (scale.rank != 2 || !divides(scale.sizes[0], rows) || !divides(scale.sizes[1], columns)) {
    throw CheckFailed("scale must have one element, or shape [a, b] where a divides the " +
                      std::to_string(rows) + " rows of x and b its last dimension, " +
                      std::to_string(columns) + ", found " + describe(scale));
  }
  return {scale.sizes[0], scale.sizes[1]};
}

int64_t block_size(int64_t whole, int64_t blocks) {
  return blocks == 0 || whole == 0 ? 1 : whole / blocks;
}

// out = x / scale; out is float8_e4m3fn or int8.
void static_quant(const View& out, const View& x, const View& scale) {
  check_activation(x);
  check_output(out, x);
  const Blocks blocks = check_scale(scale, x);
  check_disjoint(out, scale);
  OpweaveStaticQuant call;
  call.out = out.data;
  call.x = x.data;
  call.scales = reinterpret_cast<const float*>(scale.data);
  call.rows = rows_of(out, x);
  call.width = x.sizes[x.rank - 1];
  call.block_rows = block_size(call.rows.count, blocks.rows);
  call.block_columns = block_size(call.width, blocks.columns);
  call.row_blocks = blocks.columns;
  call.dtype = x.dtype;
  call.out_dtype = out.dtype;
  for_rows(call.rows.count, call.width, active_kernels().quant->static_quant, &call);
}

// scale[..., 0] = max(amax(row) / max, floor), out = x / scale.
void dynamic_per_token_quant(const View& out, const View& scale, const View& x,
                             const View* scale_ub) {
  check_activation(x);
  check_output(out, x);
  check_row_scales(scale, x, 1);
  check_disjoint(scale, x);
  check_disjoint(scale, out);
  OpweavePerTokenQuant call;
  call.out = out.data;
  call.x = x.data;
  call.scales = reinterpret_cast<float*>(scale.data);
  call.rows = rows_of(out, x);
  call.width = x.sizes[x.rank - 1];
  call.upper_bound = read_bound(scale_ub);
  call.dtype = x.dtype;
  call.out_dtype = out.dtype;
  for_rows(call.rows.count, call.width, active_kernels().quant->per_token_quant, &call);
}

// scale[..., g] covers x[..., g * group_size : (g + 1) * group_size].
void per_token_group_quant_fp8(const View& out, const View& scale, const View& x,
                               int64_t group_size, bool use_ue8m0) {
  check_activation(x);
  check_dtype(out, {OPWEAVE_FLOAT8_E4M3FN});
  check_output(out, x);
  const int64_t width = x.sizes[x.rank - 1];
  check_group_scales(scale, x, width, group_size);
  check_disjoint(scale, x);
  check_disjoint(scale, out);
  OpweaveGroupQuant call;
  call.out = out.data;
  call.x = x.data;
  call.scales = reinterpret_cast<float*>(scale.data);
  call.rows = rows_of(out, x);
  call.width = width;
  call.group_size = group_size < width ? group_size : (width > 0 ? width : 1);
  call.power_of_two = use_ue8m0;
  call.dtype = x.dtype;
  for_rows(call.rows.count, call.width, active_kernels().quant->group_quant, &call);
}

// Return the largest value, or NaN if there is one.
float largest_of(const std::vector<float>& values) {
  float most = 0;
  for (const float value : values) {
    if (value != value) return value;
    most = value > most ? value : most;
  }
  return most;
}

// scale[0] = max(amax(x) / 448, floor), out = x / scale.
void dynamic_per_tensor_quant_fp8(const View& out, const View& scale, const View& x) {
  check_activation(x);
  check_dtype(out, {OPWEAVE_FLOAT8_E4M3FN});
  check_output(out, x);
  check_one_scale(scale);
  check_disjoint(scale, x);
  check_disjoint(scale, out);
  OpweaveLargest call;
  call.x = x.data;
  call.rows = rows_of(x, x);
  std::vector<float> largest(static_cast<size_t>(call.rows.count));
  call.largest = largest.data();
  call.width = x.sizes[x.rank - 1];
  call.dtype = x.dtype;
  for_rows(call.rows.count, call.width, active_kernels().quant->largest, &call);
  const float unclamped = largest_of(largest) / 448.0f;
  const float floor = 1.0f / (448.0f * 512.0f);
  *reinterpret_cast<float*>(scale.data) = unclamped < floor ? floor : unclamped;
  static_quant(out, x, scale);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("static_quant(Tensor(a!) out, Tensor x, Tensor scale) -> ()", opweave::static_quant);
  m.def(
      "dynamic_per_token_quant(Tensor(a!) out, Tensor(b!) scale, Tensor x, Tensor? scale_ub) -> ()",
      opweave::dynamic_per_token_quant);
  m.def("dynamic_per_tensor_quant_fp8(Tensor(a!) out, Tensor(b!) scale, Tensor x) -> ()",
        opweave::dynamic_per_tensor_quant_fp8);
  m.def(
      "per_token_group_quant_fp8(Tensor(a!) out, Tensor(b!) scale, Tensor x, int group_size, "
      "bool use_ue8m0) -> ()",
      opweave::per_token_group_quant_fp8);
}
