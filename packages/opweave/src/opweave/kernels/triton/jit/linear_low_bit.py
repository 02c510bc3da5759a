"""Linear layers with weights of about four bits, which are dequantized tile by tile.

A byte has the low bits of two columns, which are *SPAN* apart: byte ``i`` of a row those of columns
``i // SPAN * 2 * SPAN + i % SPAN`` and *SPAN* more. So a tile of bytes is dequantized to two tiles
of weights, and each is multiplied by its own columns of the activations.
"""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import factor, rounded
from opweave.kernels.triton.jit.gguf_blocks import (
    blocks_of_six_bits,
    large_blocks,
    scaled,
    small_blocks,
)
from opweave.kernels.triton.jit.product import own_columns, store_sums


@triton.jit
def columns_of(x, tokens, is_token, start, width, SPAN: tl.constexpr, DEPTH: tl.constexpr):
    """Load *DEPTH* columns of the activations: those of the low bits, and those of the high."""
    if SPAN == 1:  # load neighbors together
        columns = start + tl.arange(0, DEPTH)
        mask = is_token[:, None] & (columns < width)[None, :]
        values = tl.load(x + tokens[:, None] + columns[None, :], mask=mask, other=0.0)
        low, high = tl.split(values.reshape(tokens.shape[0], DEPTH // 2, 2))
    else:
        places = tl.arange(0, DEPTH // 2)
        columns = start + places // SPAN * (2 * SPAN) + places % SPAN
        mask = is_token[:, None] & (columns < width)[None, :]
        start_of_rows = x + tokens[:, None]
        low = tl.load(start_of_rows + columns[None, :], mask=mask, other=0.0)
        high = tl.load(start_of_rows + (columns + SPAN)[None, :], mask=mask, other=0.0)
    return low, high


@triton.jit
def add_products(
    sums, x, x_rows, is_token, start, width, low, high,
    SPAN: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of *DEPTH* columns of activations and weights, given as float32."""
    kind: tl.constexpr = x.dtype.element_ty
    x_low, x_high = columns_of(x, x_rows, is_token, start, width, SPAN, DEPTH)
    low = factor(tl.trans(rounded(low, kind)), kind)
    high = factor(tl.trans(rounded(high, kind)), kind)
    sums = tl.dot(factor(x_low, kind), low, sums, input_precision=PRECISION)
    return tl.dot(factor(x_high, kind), high, sums, input_precision=PRECISION)


@triton.jit
def groups_of_int4(
    rows, places, is_row, inside, start, weight, weight_stride, scale, scale_stride,
    offset, offset_stride, group, groups, GROUPS: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile with a scale and an offset for each group of columns."""
    codes = tl.load(weight + rows * weight_stride + places, mask=inside, other=0)
    numbers = (start // group + tl.arange(0, GROUPS))[None, :]
    mask = is_row & (numbers < groups)
    factors = tl.load(scale + rows * scale_stride + numbers, mask=mask, other=0.0).to(tl.float32)
    if offset is None:
        low = scaled((codes & 15).to(tl.float32) - 8.0, factors, None, GROUPS)
        high = scaled((codes >> 4).to(tl.float32) - 8.0, factors, None, GROUPS)
    else:
        lowest = tl.load(offset + rows * offset_stride + numbers, mask=mask, other=0.0)
        lowest = lowest.to(tl.float32)
        low = scaled(codes & 15, factors, lowest, GROUPS)
        high = scaled(codes >> 4, factors, lowest, GROUPS)
    # Past the end of a row that is one group, a scale that is not finite must not give NaN.
    return tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)


@triton.jit
def linear_w4a16(
    out, x, weight, scale, offset, bias, count, feature_count, width,
    x_stride, weight_stride, scale_stride, offset_stride,
    group,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output and split of the columns.

    A step of *DEPTH* columns has *GROUPS* whole groups, or is a part of one.
    """
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < count
    x_rows = tokens.to(tl.int64) * x_stride
    is_row = (features < feature_count)[:, None]
    rows = features.to(tl.int64)[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin, end = own_columns(width, DEPTH)
    for start in range(begin, end, DEPTH):
        places = (start // 2 + tl.arange(0, DEPTH // 2))[None, :]
        inside = is_row & (places < width // 2)
        low, high = groups_of_int4(
            rows, places, is_row, inside, start, weight, weight_stride, scale, scale_stride,
            offset, offset_stride, group, tl.cdiv(width, group), GROUPS,
        )  # fmt: skip
        sums = add_products(sums, x, x_rows, is_token, start, width, low, high, 1, DEPTH, PRECISION)
    store_sums(out, bias, sums, tokens, features, count, feature_count)


@triton.jit
def linear_q(
    out, x, weight, bias, count, feature_count, width,
    x_stride, weight_stride,
    FORMAT: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of the output and split of the columns.

    *SIZE* bytes with low bits of weights belong to one group of columns, and as many high bits.
    """
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < count
    x_rows = tokens.to(tl.int64) * x_stride
    is_row = (features < feature_count)[:, None]
    rows = weight + (features.to(tl.int64) * weight_stride)[:, None]
    GROUPS: tl.constexpr = DEPTH // 2 // SIZE
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin, end = own_columns(width, DEPTH)
    for start in range(begin, end, DEPTH):
        places = (start // 2 + tl.arange(0, DEPTH // 2))[None, :]
        inside = is_row & (places < width // 2)
        groups = (start // 2 // SIZE + tl.arange(0, GROUPS))[None, :]
        in_row = is_row & (groups < width // 2 // SIZE)
        if FORMAT == "q6_k":
            low, high = blocks_of_six_bits(rows, places, inside, groups, in_row, GROUPS)
        elif FORMAT == "q4_k" or FORMAT == "q5_k":
            low, high = large_blocks(rows, places, inside, groups, in_row, FORMAT, GROUPS)
        else:
            low, high = small_blocks(rows, places, inside, groups, in_row, FORMAT, GROUPS)
        sums = add_products(
            sums, x, x_rows, is_token, start, width, low, high, SPAN, DEPTH, PRECISION
        )
    store_sums(out, bias, sums, tokens, features, count, feature_count)
