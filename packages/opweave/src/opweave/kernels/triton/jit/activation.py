"""Gated activations of the halves of a row."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import rounded
from opweave.kernels.triton.jit.rows import store_quantized

_ROOT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    else:  # 1 + tanh(u) = 2 * sigmoid(2 * u), and 1.5958 = 2 * sqrt(2 / pi)
        u = x * (x * x * (0.044715 * 1.5957691216057308) + 1.5957691216057308)
        return x / (1.0 + tl.exp(-u))


@triton.jit
def gated(start, columns, inside, width, KIND: tl.constexpr, SECOND: tl.constexpr):
    """Return the gated product as float32, rounded where the definition rounds."""
    kind: tl.constexpr = start.dtype.element_ty
    first = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    if SECOND:
        product = first * rounded(activated(second, KIND), kind).to(tl.float32)
    else:
        product = rounded(activated(first, KIND), kind).to(tl.float32) * second
    return rounded(product, kind).to(tl.float32)


@triton.jit
def act_and_mul(
    out, x, x_stride, width, KIND: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per block of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = gated(x + row * x_stride, columns, inside, width, KIND, SECOND)
    tl.store(out + row * width + columns, rounded(values, out.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul_quant(
    out, scales, x, scale, x_stride, width, SCHEME: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = gated(x + row * x_stride, columns, inside, width, "silu", False)
    store_quantized(out, scales, values, inside, row, columns, width, scale, SCHEME)
