"""Norms, gated activations and quantization of rows."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import rounded, to_float8

ALL = tl.constexpr(tl.PropagateNan.ALL)
FP8_MAX = tl.constexpr(448.0)
FP8_MIN_SCALE = tl.constexpr(1.0 / (448.0 * 512.0))
INT8_MAX = tl.constexpr(127.0)
INT8_MIN_SCALE = tl.constexpr(2.0**-23)
# Adding and subtracting this rounds a float32 below 2**22 to an integer, half to even.
ROUNDING = tl.constexpr(1.5 * 2.0**23)


# Quantize rows that are in registers.


@triton.jit
def largest(values, inside, axis: tl.constexpr):
    """Return the largest magnitude along an axis, or NaN if any element is NaN."""
    magnitudes = tl.where(inside, tl.abs(values), 0.0)
    has_nan = tl.max((magnitudes != magnitudes).to(tl.int32), axis)
    return tl.where(has_nan > 0, float("nan"), tl.max(magnitudes, axis))


@triton.jit
def fp8_scale(magnitude):
    return tl.maximum(magnitude / FP8_MAX, FP8_MIN_SCALE, propagate_nan=ALL)


@triton.jit
def to_fp8(values):
    return to_float8(tl.clamp(values, -FP8_MAX, FP8_MAX, propagate_nan=ALL))


@triton.jit
def to_int8(values):
    values = tl.where(values == values, values, 0.0)  # NaN becomes 0
    values = tl.clamp(values, -INT8_MAX - 1, INT8_MAX)
    return ((values + ROUNDING) - ROUNDING).to(tl.int8)


@triton.jit
def store_quantized(out, scales, values, inside, row, columns, width, scale, SCHEME: tl.constexpr):
    """Quantize a row of float32 into *out*, whose row stride is *width*.

    *SCHEME* ``static`` quantizes to fp8 with the given *scale*. ``fp8`` and ``int8`` compute a
    scale and store it in *scales*; for ``fp8``, *scale* is an optional upper bound for the largest
    magnitude.
    """
    if SCHEME == "static":
        factor = 1.0 / tl.load(scale)
    else:
        magnitude = largest(values, inside, 0)
        if SCHEME == "fp8":
            if scale is not None:
                magnitude = tl.minimum(magnitude, tl.load(scale), propagate_nan=ALL)
            found = fp8_scale(magnitude)
        else:
            found = tl.maximum(magnitude / INT8_MAX, INT8_MIN_SCALE, propagate_nan=ALL)
        tl.store(scales + row, found)
        factor = 1.0 / found
    codes = to_int8(values * factor) if SCHEME == "int8" else to_fp8(values * factor)
    tl.store(out + row * width + columns, codes, mask=inside)


# RMS norm, one program per row.


@triton.jit
def rms_norm(
    out, scales, total, x, residual, weight, scale,
    out_stride, total_stride, x_stride, residual_stride,
    width, epsilon,
    SCHEME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add *residual*, normalize, and quantize with *SCHEME*; the first and last are optional."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        values = rounded(values.to(tl.float32) + added.to(tl.float32), x.dtype.element_ty)
        tl.store(total + row * total_stride + columns, values, mask=inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    if weight is not None:
        kind: tl.constexpr = weight.dtype.element_ty
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        normed = rounded(rounded(normed, kind).to(tl.float32) * factor, kind).to(tl.float32)
    result = rounded(normed, x.dtype.element_ty)
    if SCHEME is None:
        tl.store(out + row * out_stride + columns, result, mask=inside)
    else:
        store_quantized(
            out, scales, result.to(tl.float32), inside, row, columns, out_stride, scale, SCHEME
        )


# Gated activations of the halves of a row.


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


# Quantization to 8 bits, with one scale per tensor, row, or group of a row.


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
