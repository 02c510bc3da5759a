"""Quantization to 8 bits, with one scale per tensor, row, or group of a row."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.activation import gated
from opweave.kernels.triton.jit.rows import fp8_scale, largest, store_quantized, to_fp8, to_int8


@triton.jit
def static_quant(out, x, scale, x_stride, width, IS_INT8: tl.constexpr, BLOCK: tl.constexpr):
    """One program per block of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    factor = 1.0 / tl.load(scale)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32) * factor
    codes = to_int8(values) if IS_INT8 else to_fp8(values)
    tl.store(out + row * width + columns, codes, mask=inside)


@triton.jit
def dynamic_quant(
    out, scales, x, bound, x_stride, width, SCHEME: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    store_quantized(out, scales, values, inside, row, columns, width, bound, SCHEME)


@triton.jit
def group_quant(
    out, scales, x,
    x_stride,
    width, group_size, group_count,
    IS_GATED: tl.constexpr, USE_UE8M0: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per *GROUPS* groups of a row; the last group of a row may be shorter."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    places = tl.arange(0, BLOCK)
    columns = groups[:, None] * group_size + places[None, :]
    inside = (places[None, :] < group_size) & (columns < width)
    start = x + row * x_stride
    if IS_GATED:
        values = gated(start, columns, inside, width, "silu", False)
    else:
        values = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = fp8_scale(largest(values, inside, 1))
    if USE_UE8M0:  # rounds up to a power of two: a nonzero mantissa carries into the exponent
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    tl.store(scales + row * group_count + groups, scale, mask=groups < group_count)
    tl.store(out + row * width + columns, to_fp8(values / scale[:, None]), mask=inside)
