"""Attention over the paged cache.

A block number out of range turns the outputs that attend to it into NaN; with ``TRITON_DEBUG=1``, a
device assert fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.paged_attention import paged_attention as op
from opweave.kernels.paged import ATTENDS, attention_fits, has_whole_rows
from opweave.kernels.triton.arguments import on_device
from opweave.kernels.triton.device import MANY_BYTES, shared_memory, split_count
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.registration import block_of, implements

_kernels = Kernels("paged_attention")
_MAX_HEAD_SIZE = 256
_MAX_GROUP = 32
_MIN_SPLIT = 128  # keys; smaller splits are not worth a program
_MAX_SPLITS = 64
_PER_PROCESSOR = 4  # programs of a multiprocessor
_WHY = (
    f"shapes do not fit, heads are larger than {_MAX_HEAD_SIZE} or in groups of more than "
    f"{_MAX_GROUP}, rows of a cache are not contiguous, or window or soft_cap is not positive"
)


def _heads_fit(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    return (
        has_whole_rows(key_cache)
        and has_whole_rows(value_cache)
        and query.shape[1] // key_cache.shape[1] <= _MAX_GROUP
        and query.shape[2] <= _MAX_HEAD_SIZE
        and 0 < value_cache.shape[3] <= _MAX_HEAD_SIZE
    )


@implements(
    op,
    on_device("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_seqlens_q")
    & ATTENDS
    & rules.custom(attention_fits, _WHY)
    & rules.custom(_heads_fit, _WHY),
    traits=(),  # not batch-invariant: the number of splits depends on the number of sequences
)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return the attention of each query over the keys of its sequence."""
    tokens, heads, size = query.shape
    blocks, key_heads, block_size, _ = key_cache.shape
    sequences, width = block_tables.shape
    value_size, group = value_cache.shape[3], heads // key_heads
    out = query.new_zeros(tokens, heads, value_size)
    if not sequences or not blocks:
        return out
    rows, keys = _tile(query, group, sequences, value_size)
    queries = rows // group
    tiles = tokens // queries + sequences
    most = min(-(-width * block_size // _MIN_SPLIT), _MAX_SPLITS)
    splits = split_count(tiles * key_heads, _PER_PROCESSOR, most, query.device)
    parts, maxima, totals = out, None, None
    if splits > 1:
        parts = query.new_empty((tokens, heads, splits, value_size), dtype=torch.float32)
        maxima = parts.new_full((tokens, heads, splits), float("-inf"))
        totals = parts.new_zeros((tokens, heads, splits))
    launch(
        _kernels.attend,
        (tiles, key_heads, splits),
        parts,
        maxima,
        totals,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        size**-0.5 if scale is None else scale,
        soft_cap,
        window,
        splits,
        sequences,
        blocks,
        width,
        block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        heads,
        size,
        value_size,
        BLOCK_SIZE=block_size,
        GROUP=group,
        CAUSAL=causal,
        IS_SPLIT=splits > 1,
        QUERIES=queries,
        ROWS=rows,
        KEYS=keys,
        SIZE=max(block_of(size), 16),
        VALUE_SIZE=max(block_of(value_size), 16),
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_stages=3 if shared_memory(query.device) >= MANY_BYTES else 1,
    )
    if splits > 1:
        launch(
            _kernels.join,
            (tokens * heads,),
            out,
            parts,
            maxima,
            totals,
            value_size,
            SPLITS=splits,
            VALUE_SIZE=block_of(value_size),
        )
    return out


def _tile(query: Tensor, group: int, sequences: int, value_size: int) -> tuple[int, int]:
    """Return the tile size: rows (pairs of a query and a head), and keys."""
    bytes_of_key = max(query.shape[2], value_size) * query.element_size()
    decodes = query.shape[0] <= 2 * sequences
    rows = 16 if decodes else 64 if bytes_of_key <= 512 else 32
    keys = 64 if bytes_of_key <= 256 else 32 if bytes_of_key <= 512 else 16
    if shared_memory(query.device) < MANY_BYTES:
        rows, keys = min(rows, 32), min(keys, 32)
    return max(block_of(group), rows), keys
