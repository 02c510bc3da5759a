// Linear layers with the blocks of GGUF files: argument checks, then the kernels.
#include "kernels/gguf.h"

#include "module/linear_many.h"
#include "module/module.h"
#include "module/packed_linear.h"

namespace opweave {
namespace {

// Return the weights for rows of `width` columns. `format` is the position of one in
// OpweaveGgufFormat.
OpweaveGgufWeight checked_weight(const View& weight, int64_t width, int64_t format) {
  check_dtype(weight, {OPWEAVE_UINT8});
  if (format < 0 || format >= OPWEAVE_GGUF_FORMATS) {
    throw CheckFailed("format must be from 0 to " + std::to_string(OPWEAVE_GGUF_FORMATS - 1) +
                      ", found " + std::to_string(format));
  }
  OpweaveGgufWeight result;
  result.format = static_cast<OpweaveGgufFormat>(format);
  const OpweaveGgufKernels& kernels = *active_kernels().gguf;
  const int64_t columns = kernels.block_columns(result.format);
  const int64_t bytes = width / columns * kernels.block_bytes(result.format);
  if (weight.rank != 2 || width % columns != 0 || weight.sizes[1] != bytes) {
    refuse_shape(weight, "[out_features, " + std::to_string(bytes) + "], blocks for " +
                             std::to_string(width) + " columns");
  }
  check_unit_stride(weight);
  result.blocks = reinterpret_cast<const uint8_t*>(weight.data);
  result.width = width;
  result.stride = weight.strides[0];
  return result;
}

void multiply_few(const View& out, const View& x, const View& weight, const View* bias,
                  int64_t format, bool is_int8) {
  check_activation(x);
  OpweaveLinearGguf call;
  call.weight = checked_weight(weight, x.sizes[x.rank - 1], format);
  check_packed_operands(out, x, weight, bias);
  check_disjoint(out, weight);
  if (out.element_count() == 0) return;

  const OpweaveGgufKernels& kernels = *active_kernels().gguf;
  OpweaveGgufTokens kept;
  kept.width = call.weight.width;
  kept.format = call.weight.format;
  kept.is_int8 = is_int8;
  kept.stride = kernels.token_bytes(x.dtype, kept.width, kept.format, kept.is_int8);
  run_packed(kernels, kept, call, out, x, weight.sizes[0], bias, OPWEAVE_GGUF_TOKENS,
             weight.sizes[1]);
}

// out = x @ dequantized(weight).T + bias.
void linear_gguf(const View& out, const View& x, const View& weight, const View* bias,
                 int64_t format) {
  multiply_few(out, x, weight, bias, format, false);
}

// Like linear_gguf, but with x rounded to 8 bits, with a scale for 32 columns.
void linear_gguf_int8(const View& out, const View& x, const View& weight, const View* bias,
                      int64_t format) {
  multiply_few(out, x, weight, bias, format, true);
}

// Like linear_gguf, but with at least `fewest` tokens in bfloat16, use the kernel for many tokens,
// if there is one.
void linear_gguf_many(const View& out, const View& x, const View& weight, const View* bias,
                      int64_t format, int64_t fewest) {
  check_activation(x);
  const OpweaveLinearMany& many = active_kernels().gguf->many;
  if (x.dtype != OPWEAVE_BFLOAT16 || !takes_many(many, x, fewest)) {
    return linear_gguf(out, x, weight, bias, format);
  }
  OpweaveManyGguf call;
  call.weight = checked_weight(weight, x.sizes[x.rank - 1], format);
  check_packed_operands(out, x, weight, bias);
  check_disjoint(out, weight);
  if (out.element_count() > 0) run_many_low_bit(many, call, out, x, bias);
}

// out = dequantized(weight), in float32 or bfloat16.
void widen_gguf(const View& out, const View& weight, int64_t format) {
  check_dtype(out, {OPWEAVE_FLOAT32, OPWEAVE_BFLOAT16});
  if (out.rank != 2) refuse_shape(out, "[out_features, in_features]");
  check_contiguous(out);
  OpweaveWidenGguf call;
  call.weight = checked_weight(weight, out.sizes[1], format);
  if (out.sizes[0] != weight.sizes[0]) {
    refuse_shape(out, "[" + std::to_string(weight.sizes[0]) + ", in_features], the rows of weight");
  }
  check_disjoint(out, weight);
  if (out.element_count() == 0) return;
  call.out = out.data;
  call.out_dtype = out.dtype;
  for_rows(weight.sizes[0], call.weight.width, active_kernels().gguf->widen, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "linear_gguf(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int format) -> ()",
      opweave::linear_gguf);
  m.def(
      "linear_gguf_int8(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int format) -> ()",
      opweave::linear_gguf_int8);
  m.def(
      "linear_gguf_many(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int format,"
      " int fewest) -> ()",
      opweave::linear_gguf_many);
  m.def("widen_gguf(Tensor(a!) out, Tensor weight, int format) -> ()", opweave::widen_gguf);
}
