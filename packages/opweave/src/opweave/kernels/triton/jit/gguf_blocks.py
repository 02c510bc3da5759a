"""Dequantize tiles of the blocks of GGUF files, which ``opweave.ir.ops.low_bit`` describes.

Numbers are read byte by byte, because blocks have any alignment.
"""

import triton
import triton.language as tl


@triton.jit
def scaled(codes, scale, offset, GROUPS: tl.constexpr):
    """Return ``codes * scale + offset``, as float32, for the groups of columns in each row."""
    rows: tl.constexpr = codes.shape[0]
    size: tl.constexpr = codes.shape[1]
    values = codes.to(tl.float32).reshape(rows, GROUPS, size // GROUPS) * scale[:, :, None]
    if offset is not None:
        values += offset[:, :, None]
    return values.reshape(rows, size)


@triton.jit
def float16_at(places, mask):
    """Load float16 numbers, as float32."""
    low = tl.load(places, mask=mask, other=0).to(tl.uint16)
    high = tl.load(places + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def six_bits(places, numbers, mask):
    """Load factors and minima, of *numbers* 0 to 7, from the 12 bytes at *places*."""
    first = tl.load(places + numbers % 4, mask=mask, other=0)
    second = tl.load(places + 4 + numbers % 4, mask=mask, other=0)
    rest = tl.load(places + 8 + numbers % 4, mask=mask, other=0)
    is_first = numbers < 4
    factors = tl.where(is_first, first & 63, (rest & 15) | ((first >> 6) << 4))
    minima = tl.where(is_first, second & 63, (rest >> 4) | ((second >> 6) << 4))
    return factors.to(tl.float32), minima.to(tl.float32)


@triton.jit
def small_blocks(rows, places, inside, groups, in_row, FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """Dequantize blocks of 32 columns: q8_0, q4_0 and q4_1."""
    SIZE: tl.constexpr = 34 if FORMAT == "q8_0" else 18 if FORMAT == "q4_0" else 20
    HEAD: tl.constexpr = 4 if FORMAT == "q4_1" else 2
    heads = rows + groups * SIZE
    scale = float16_at(heads, in_row)
    spots = rows + places // 16 * SIZE + HEAD + places % 16
    codes = tl.load(spots, mask=inside, other=0)
    if FORMAT == "q8_0":
        more = tl.load(spots + 16, mask=inside, other=0)
        low = scaled(codes.to(tl.int8, bitcast=True), scale, None, GROUPS)
        high = scaled(more.to(tl.int8, bitcast=True), scale, None, GROUPS)
    elif FORMAT == "q4_0":
        low = scaled((codes & 15).to(tl.float32) - 8.0, scale, None, GROUPS)
        high = scaled((codes >> 4).to(tl.float32) - 8.0, scale, None, GROUPS)
    else:
        offset = float16_at(heads + 2, in_row)
        low = scaled(codes & 15, scale, offset, GROUPS)
        high = scaled(codes >> 4, scale, offset, GROUPS)
    return low, high


@triton.jit
def large_blocks(rows, places, inside, groups, in_row, FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """Dequantize blocks of 256 columns with a factor and a minimum for every 32: q4_k and q5_k."""
    SIZE: tl.constexpr = 144 if FORMAT == "q4_k" else 176
    blocks, place = rows + places // 128 * SIZE, places % 128
    codes = tl.load(blocks + (SIZE - 128) + place, mask=inside, other=0)
    low, high = codes & 15, codes >> 4
    if FORMAT == "q5_k":
        fifth = tl.load(blocks + 16 + place % 32, mask=inside, other=0) >> (place // 32 * 2)
        low = low | ((fifth & 1) << 4)
        high = high | ((fifth & 2) << 3)
    heads, numbers = rows + groups // 4 * SIZE, groups % 4 * 2
    scale, least = float16_at(heads, in_row), float16_at(heads + 2, in_row)
    factors, minima = six_bits(heads + 4, numbers, in_row)
    low = scaled(low, scale * factors, -(least * minima), GROUPS)
    factors, minima = six_bits(heads + 4, numbers + 1, in_row)
    high = scaled(high, scale * factors, -(least * minima), GROUPS)
    return low, high


@triton.jit
def blocks_of_six_bits(rows, places, inside, groups, in_row, GROUPS: tl.constexpr):
    """Dequantize blocks of 256 columns with a factor for every 16: q6_k."""
    blocks, half, place = rows + places // 128 * 210, places % 128 // 64, places % 64
    codes = tl.load(blocks + half * 64 + place, mask=inside, other=0)
    rest = tl.load(blocks + 128 + half * 32 + place % 32, mask=inside, other=0)
    rest = rest >> (place // 32 * 2)
    low = ((codes & 15) | ((rest & 3) << 4)).to(tl.float32) - 32.0
    high = ((codes >> 4) | (((rest >> 4) & 3) << 4)).to(tl.float32) - 32.0
    heads = rows + groups // 8 * 210
    scale = float16_at(heads + 208, in_row)
    factors = heads + 192 + groups % 8 // 4 * 8 + groups % 4
    first = tl.load(factors, mask=in_row, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    second = tl.load(factors + 4, mask=in_row, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    return scaled(low, scale * first, None, GROUPS), scaled(high, scale * second, None, GROUPS)
