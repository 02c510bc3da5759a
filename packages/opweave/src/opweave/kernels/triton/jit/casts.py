"""Round float32 to narrower types, half to even.

GPUs do this in hardware. Triton's interpreter loses the carry when it rounds up, and cannot
multiply bfloat16 matrices, so this module computes the bits and multiplies in float32 instead.
"""

import triton
import triton.language as tl

from opweave.kernels.triton import launch

INTERPRETED = tl.constexpr(launch.INTERPRETED)


@triton.jit
def rounded(values, kind: tl.constexpr):
    """Round float32 to *kind*: float32, bfloat16 or float16."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(kind)


@triton.jit
def to_float8(values):
    """Round float32 to float8_e4m3fn; magnitudes must be at most 448 or NaN."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6, values are multiples of 2**-9. Adding 1.5 * 2**23 to x * 2**9 rounds it to an
        # integer in the low bits of the mantissa.
        subnormal = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
        codes = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
        codes = tl.where(values == values, codes, 0x7F)
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return values.to(tl.float8e4nv)


@triton.jit
def factor(values, kind: tl.constexpr):
    """Convert *values* to the operand type of a matrix product for *kind*."""
    if INTERPRETED:
        return values.to(tl.float32)
    else:
        return values.to(kind)
