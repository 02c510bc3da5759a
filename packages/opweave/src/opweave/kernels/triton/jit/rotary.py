"""Rotary position embedding, one program per token and tensor."""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import rounded


@triton.jit
def rotate(x, y, cos, sin):
    """Return ``x * cos - y * sin``, rounded at every step as in the definition."""
    kind: tl.constexpr = x.dtype
    first = rounded(x.to(tl.float32) * cos, kind).to(tl.float32)
    second = rounded(y.to(tl.float32) * sin, kind).to(tl.float32)
    return rounded(first - second, kind)


@triton.jit
def rotate_heads(
    out, x, cos, sin, count, size, half,
    IS_NEOX: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    for start in range(0, count, HEADS):
        heads = start + tl.arange(0, HEADS)
        offsets = (heads * size)[:, None]
        if IS_NEOX:
            pairs = tl.arange(0, HALF)[None, :]
            inside = (heads < count)[:, None] & (pairs < half)
            low = tl.load(x + offsets + pairs, mask=inside)
            high = tl.load(x + offsets + half + pairs, mask=inside)
            tl.store(out + offsets + pairs, rotate(low, high, cos, sin), mask=inside)
            tl.store(out + offsets + half + pairs, rotate(high, low, cos, -sin), mask=inside)
        else:
            columns = tl.arange(0, 2 * HALF)[None, :]
            inside = (heads < count)[:, None] & (columns < 2 * half)
            both = tl.load(x + offsets + columns, mask=inside)
            low, high = tl.split(both.reshape(HEADS, HALF, 2))
            both = tl.interleave(rotate(low, high, cos, sin), rotate(high, low, cos, -sin))
            tl.store(out + offsets + columns, both, mask=inside)
        if REST > 0:
            columns = 2 * half + tl.arange(0, REST)
            inside = (heads < count)[:, None] & (columns < size)[None, :]
            rest = tl.load(x + offsets + columns[None, :], mask=inside)
            tl.store(out + offsets + columns[None, :], rest, mask=inside)


@triton.jit(do_not_specialize=["table_size"])
def rotary_embedding(
    query_out, key_out, query, key, positions, table,
    query_stride, key_stride, table_stride,
    table_size, query_heads, key_heads, size, half,
    IS_NEOX: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    position = tl.where(position < 0, position + table_size, position)
    tl.device_assert((position >= 0) & (position < table_size), "a position is not in the table")
    pairs = tl.arange(0, HALF)
    angles = table + position * table_stride + pairs
    # The angles of a position out of range are NaN.
    mask = pairs < tl.where((position >= 0) & (position < table_size), half, 0)
    kind: tl.constexpr = query.dtype.element_ty
    cos = tl.load(angles, mask=mask, other=float("nan")).to(tl.float32)
    sin = tl.load(angles + half, mask=mask, other=float("nan")).to(tl.float32)
    cos = rounded(cos, kind).to(tl.float32)[None, :]
    sin = rounded(sin, kind).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        out = query_out + token * query_heads * size
        x = query + token * query_stride
        rotate_heads(out, x, cos, sin, query_heads, size, half, IS_NEOX, HEADS, HALF, REST)
    else:
        out = key_out + token * key_heads * size
        x = key + token * key_stride
        rotate_heads(out, x, cos, sin, key_heads, size, half, IS_NEOX, HEADS, HALF, REST)
