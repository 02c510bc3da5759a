"""Quantize rows that are in registers."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import to_float8

ALL = tl.constexpr(tl.PropagateNan.ALL)
FP8_MAX = tl.constexpr(448.0)
FP8_MIN_SCALE = tl.constexpr(1.0 / (448.0 * 512.0))
INT8_MAX = tl.constexpr(127.0)
INT8_MIN_SCALE = tl.constexpr(2.0**-23)
# Adding and subtracting this rounds a float32 below 2**22 to an integer, half to even.
ROUNDING = tl.constexpr(1.5 * 2.0**23)


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
