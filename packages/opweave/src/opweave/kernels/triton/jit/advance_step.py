"""Advance the decode inputs by one token, one program per block of sequences."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "queries", "table_width"])
def advance_step(
    tokens, positions, new_lengths, slots, sampled, lengths, tables, count, queries,
    sampled_stride, length_stride, table_stride,
    table_width, block_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    is_query = rows < queries
    length = tl.load(lengths + rows * length_stride, mask=inside, other=0)
    position = length.to(tl.int64)
    column = position // block_size
    can_advance = is_query & (position >= 0) & (column < table_width)
    tl.device_assert(can_advance | (rows >= queries), "a sequence cannot advance")
    place = tables + rows.to(tl.int64) * table_stride + column
    block = tl.load(place, mask=can_advance, other=0).to(tl.int64)
    slot = tl.where(can_advance, block * block_size + position % block_size, -1)
    token = tl.load(sampled + rows * sampled_stride, mask=is_query, other=0)
    tl.store(tokens + rows, token, mask=inside)
    tl.store(positions + rows, tl.where(is_query, position, 0), mask=inside)
    tl.store(new_lengths + rows, tl.where(is_query, length + 1, length), mask=inside)
    tl.store(slots + rows, slot, mask=inside)
