"""Attention over the paged cache: one program per tile of queries of a sequence and key head.

It uses the online softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691). With
few queries, several programs share the keys of a sequence, and a second kernel combines their
partial results (Dao et al., "Flash-Decoding", 2023).
"""

import triton
import triton.language as tl

from opweave.kernels.triton.jit.casts import factor, rounded


@triton.jit
def sequence_of(tile, boundaries, sequences, QUERIES: tl.constexpr):
    """Return the sequence of a tile of queries, by binary search.

    The tiles of sequence ``i`` begin at ``boundaries[i] // QUERIES + i``, so tiles never span
    sequences. The grid has a few unused tiles.
    """
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(boundaries + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def add_nonfinite(sums, weights, visible, values):
    """Add the infinities and NaN in *values* to the rows that attend to them."""
    high = tl.dot(weights, (values == float("inf")).to(weights.dtype))
    low = tl.dot(weights, (values == float("-inf")).to(weights.dtype))
    nan = tl.dot(visible.to(weights.dtype), (values != values).to(weights.dtype))
    sums += tl.where(high > 0.0, float("inf"), 0.0)
    sums += tl.where(low > 0.0, float("-inf"), 0.0)
    return sums + tl.where(nan > 0.0, float("nan"), 0.0)


@triton.jit
def walk(
    q, keys, values, table, positions, is_query, begin, end, scale, soft_cap, window, blocks,
    key_block_stride, key_position_stride, value_block_stride, value_position_stride,
    size, value_size,
    BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Compute unnormalized attention over the keys from *begin* to *end* of one head.

    Returns the weighted sums of values, the largest score of each row, and the sums of the weights.
    Without *CAREFUL*, a value that is not finite gives NaN even if its weight is 0.
    """
    columns = tl.arange(0, SIZE)
    value_columns = tl.arange(0, VALUE_SIZE)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
    kind: tl.constexpr = keys.dtype.element_ty
    for start in range(begin, end, KEYS):
        spots = start + tl.arange(0, KEYS)
        is_key = spots < end
        block = tl.load(table + spots // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        tl.device_assert((block >= 0) & (block < blocks), "a block is not in the cache")
        is_there = is_key & (block >= 0) & (block < blocks)
        inner = spots % BLOCK_SIZE
        k = tl.load(
            keys
            + (block * key_block_stride + inner * key_position_stride)[None, :]
            + columns[:, None],
            mask=is_there[None, :] & (columns[:, None] < size),
            other=0.0,
        )
        v = tl.load(
            values
            + (block * value_block_stride + inner * value_position_stride)[:, None]
            + value_columns[None, :],
            mask=is_there[:, None] & (value_columns[None, :] < value_size),
            other=0.0,
        )
        scores = tl.dot(q, factor(k, kind), input_precision=PRECISION) * scale
        if soft_cap is not None:  # tanh(u) = 2 * sigmoid(2 * u) - 1
            scores = soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / soft_cap)) - 1.0)
        visible = is_query[:, None] & is_key[None, :]
        if CAUSAL:
            visible = visible & (spots[None, :] <= positions[:, None])
        if window is not None:
            visible = visible & (spots[None, :] > positions[:, None] - window)
        # Keys of blocks that are out of range have NaN scores.
        scores = tl.where(is_there[None, :], scores, float("nan"))
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(largest - base)
        weights = tl.exp(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums *= shrink[:, None]
        if CAREFUL:
            wide = v.to(tl.float32)
            sums = add_nonfinite(sums, weights, visible, wide)
            v = tl.where(tl.abs(wide) < float("inf"), v, 0.0)
        sums += tl.dot(factor(weights, kind), factor(v, kind), input_precision=PRECISION)
        largest = higher
    return sums, largest, total


@triton.jit(do_not_specialize=["window", "splits", "sequences", "blocks", "table_width"])
def attend(
    out, maxima, totals, query, keys, values, tables, lengths, boundaries, scale, soft_cap, window,
    splits, sequences, blocks, table_width,
    table_stride, query_stride, query_head_stride, key_block_stride, key_head_stride,
    key_position_stride, value_block_stride, value_head_stride, value_position_stride,
    query_heads, size, value_size,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, IS_SPLIT: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention for one tile of queries, the heads of one group, and one split of the keys.

    Row ``r`` of the tile is query ``r // GROUP`` and head ``r % GROUP`` of the group. With several
    *splits*, *out* receives unnormalized float32 results per split, *maxima* the largest scores and
    *totals* the sums of the exponentials.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = sequence_of(tile, boundaries, sequences, QUERIES)
    first = tl.load(boundaries + sequence)
    count = tl.load(boundaries + sequence + 1) - first
    place = (tile - (first // QUERIES + sequence)) * QUERIES
    length = tl.minimum(tl.load(lengths + sequence), table_width * BLOCK_SIZE)
    if place < count:
        rows = tl.arange(0, ROWS)
        numbers = place + rows // GROUP  # query indices in the sequence
        is_query = (rows < QUERIES * GROUP) & (numbers < count)
        heads = head * GROUP + rows % GROUP
        positions = length - count + numbers
        tokens = (first + numbers).to(tl.int64)
        columns = tl.arange(0, SIZE)
        q = tl.load(
            query
            + tokens[:, None] * query_stride
            + heads[:, None] * query_head_stride
            + columns[None, :],
            mask=is_query[:, None] & (columns[None, :] < size),
            other=0.0,
        )
        share = tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS
        begin = split * share
        end = tl.minimum(begin + share, length)
        if CAUSAL:
            last = length - count + tl.minimum(place + QUERIES, count) - 1
            end = tl.minimum(end, last + 1)
        if window is not None:
            oldest = tl.maximum(length - count + place - window + 1, 0)
            begin = tl.maximum(begin, oldest // KEYS * KEYS)
        q = factor(q, query.dtype.element_ty)
        keys += head * key_head_stride
        values += head * value_head_stride
        table = tables + sequence.to(tl.int64) * table_stride
        sums, largest, total = walk(
            q, keys, values, table, positions, is_query, begin, end, scale, soft_cap, window,
            blocks, key_block_stride, key_position_stride,
            value_block_stride, value_position_stride, size, value_size,
            BLOCK_SIZE, CAUSAL, ROWS, KEYS, SIZE, VALUE_SIZE, PRECISION, False,
        )  # fmt: skip
        is_finite = tl.abs(sums) < float("inf")
        if tl.min(tl.min(is_finite.to(tl.int32), 1), 0) == 0:
            sums, largest, total = walk(
                q, keys, values, table, positions, is_query, begin, end, scale, soft_cap, window,
                blocks, key_block_stride, key_position_stride,
                value_block_stride, value_position_stride, size, value_size,
                BLOCK_SIZE, CAUSAL, ROWS, KEYS, SIZE, VALUE_SIZE, PRECISION, True,
            )  # fmt: skip
        value_columns = tl.arange(0, VALUE_SIZE)
        rows_out = (tokens * query_heads + heads) * splits + split
        inside = is_query[:, None] & (value_columns[None, :] < value_size)
        places = rows_out[:, None] * value_size + value_columns[None, :]
        if IS_SPLIT:
            tl.store(out + places, sums, mask=inside)
            tl.store(maxima + rows_out, largest, mask=is_query)
            tl.store(totals + rows_out, total, mask=is_query)
        else:
            found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + places, rounded(found, out.dtype.element_ty), mask=inside)


@triton.jit
def join(out, parts, maxima, totals, value_size, SPLITS: tl.constexpr, VALUE_SIZE: tl.constexpr):
    """Combine the splits of one query and head, one program each."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, VALUE_SIZE)
    inside = columns < value_size
    largest = tl.load(maxima + row * SPLITS + splits)
    higher = tl.max(largest, 0)
    factors = tl.exp(largest - tl.where(higher == float("-inf"), 0.0, higher))
    total = tl.sum(tl.load(totals + row * SPLITS + splits) * factors, 0)
    sums = tl.load(
        parts + (row * SPLITS + splits)[:, None] * value_size + columns[None, :],
        mask=inside[None, :] & (largest > float("-inf"))[:, None],  # the others are not written
        other=0.0,
    )
    found = tl.sum(sums * factors[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * value_size + columns, rounded(found, out.dtype.element_ty), mask=inside)
