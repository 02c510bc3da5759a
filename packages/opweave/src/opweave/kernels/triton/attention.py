"""Attention over the paged cache, writes into it, and rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.arguments import ATTENDS, FLOATS, WRITES, attention_fits, has_whole_rows
from opweave.kernels.triton.launch import (
    MANY_BYTES,
    NAMESPACE,
    Kernels,
    block_of,
    implements,
    launch,
    on_device,
    shared_memory,
    split_count,
)
from opweave.kernels.wrap import mutating, undispatched

# Write keys and values into the paged cache, in-place.
#
# A slot out of range is skipped; with ``TRITON_DEBUG=1``, a device assert fails.


_kv_cache_kernels = Kernels("kv_cache")
_KV_CACHE_BLOCK = 1024


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    blocks, heads, block_size, size = key_cache.shape
    value_size = value_cache.shape[3]
    launch(
        _kv_cache_kernels.reshape_and_cache, (key.shape[0],),
        key_cache, value_cache, key, value, slot_mapping, blocks * block_size, block_size, heads,
        size, value_size,
        *key_cache.stride()[:3], *value_cache.stride()[:3], *key.stride()[:2], *value.stride()[:2],
        BLOCK=min(block_of(heads * max(size, value_size)), _KV_CACHE_BLOCK),
    )  # fmt: skip


_traced_write = mutating(
    NAMESPACE,
    "write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()",
)(_write)


def _plain(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    _write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


@implements(
    ops.reshape_and_cache,
    on_device("key", "value", "key_cache", "value_cache", "slot_mapping") & WRITES,
    inplace=True,
)
@undispatched(_plain)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write *key* and *value* into their slots of the caches, in-place."""
    _traced_write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


# Rotary position embedding.
#
# A position out of range gives NaN; with ``TRITON_DEBUG=1``, a device assert fails.


_rotary_kernels = Kernels("rotary")
_ROTARY_MAX_HEAD_SIZE = 1024
_TILE = 1024  # pairs per iteration


def _rotary_fits(
    x_query: Tensor, x_key: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int
) -> bool:
    return (
        1 <= head_size <= _ROTARY_MAX_HEAD_SIZE
        and cos_sin_cache.ndim == 2
        and 0 < cos_sin_cache.shape[1] <= head_size
        and cos_sin_cache.shape[1] % 2 == 0
        and all(_has_heads(x, positions, head_size) for x in (x_query, x_key))
    )


def _has_heads(x: Tensor, positions: Tensor, head_size: int) -> bool:
    """Return whether *x* has whole heads per position, and the heads of a token are contiguous."""
    rank = positions.ndim
    if x.shape[:rank] != positions.shape:
        return False
    if x.ndim == rank + 1:
        fits = x.shape[-1] % head_size == 0
    else:
        fits = x.ndim == rank + 2 and x.shape[-1] == head_size
    if not fits or x.is_contiguous():
        return fits
    return rank == 1 and x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == head_size)


@implements(
    ops.rotary_embedding,
    on_device("x_query", "x_key", "positions", "cos_sin_cache")
    & rules.dtype("x_query", *FLOATS)
    & rules.same_dtype("x_query", "x_key")
    & (rules.same_dtype("x_query", "cos_sin_cache") | rules.dtype("cos_sin_cache", torch.float32))
    & rules.dtype("positions", torch.int64, torch.int32)
    & rules.contiguous("positions")
    & rules.unit_stride("cos_sin_cache")
    & rules.custom(
        _rotary_fits, "heads, table and head size do not fit, or heads are not contiguous"
    ),
)
def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of *x_query* and *x_key* by the angles of their *positions*."""
    query, key = (x.new_empty(x.shape) for x in (x_query, x_key))
    half = cos_sin_cache.shape[1] // 2
    widths = [math.prod(x.shape[positions.ndim :]) for x in (x_query, x_key)]
    counts = [width // head_size for width in widths]
    strides = [
        width if x.is_contiguous() else x.stride(0)
        for x, width in zip((x_query, x_key), widths, strict=True)
    ]
    rest = head_size - 2 * half
    launch(
        _rotary_kernels.rotary_embedding, (positions.numel(), 2),
        query, key, x_query, x_key, positions, cos_sin_cache,
        *strides, cos_sin_cache.stride(0),
        cos_sin_cache.shape[0], *counts, head_size, half,
        IS_NEOX=is_neox_style, HEADS=min(block_of(max(counts)), max(_TILE // block_of(half), 1)),
        HALF=block_of(half), REST=block_of(rest) if rest else 0,
    )  # fmt: skip
    return query, key


# Advance the decode inputs of all sequences by one token.
#
# A sequence that cannot advance gets slot -1, which ``reshape_and_cache`` skips; with
# ``TRITON_DEBUG=1``, a device assert fails. Checking on the host would synchronize with the GPU.


_advance_step_kernels = Kernels("advance_step")
_ADVANCE_STEP_BLOCK = 128
_VECTORS = ("input_tokens", "input_positions", "slot_mapping")


def _advance_step_fits(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> bool:
    count, queries = seq_lens.shape[0], sampled_token_ids.shape[0]
    return (
        input_tokens.shape == input_positions.shape == slot_mapping.shape == seq_lens.shape
        and sampled_token_ids.shape[1:] in ((), (1,))
        and queries <= count == block_tables.shape[0]
        and block_size >= 1
    )


@implements(
    ops.advance_step_flashattn,
    on_device(*_VECTORS, "sampled_token_ids", "seq_lens", "block_tables")
    & rules.dtype("input_tokens", torch.int64)
    & rules.same_dtype(*_VECTORS, "sampled_token_ids")
    & rules.dtype("seq_lens", torch.int32, torch.int64)
    & rules.dtype("block_tables", torch.int32, torch.int64)
    & rules.ndim("seq_lens", 1)
    & rules.ndim("sampled_token_ids", 1, 2)
    & rules.ndim("block_tables", 2)
    & rules.unit_stride("block_tables")
    & rules.custom(_advance_step_fits, "shapes do not fit, or block_size is not positive"),
)
def advance_step_flashattn(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Advance every sequence, and return new tensors."""
    count = seq_lens.shape[0]
    tokens, positions, slots = (sampled_token_ids.new_empty(count) for _ in range(3))
    lengths = seq_lens.new_empty(count)
    launch(
        _advance_step_kernels.advance_step, (-(-count // _ADVANCE_STEP_BLOCK),),
        tokens, positions, lengths, slots, sampled_token_ids, seq_lens, block_tables, count,
        sampled_token_ids.shape[0],
        sampled_token_ids.stride(0), seq_lens.stride(0), block_tables.stride(0),
        block_tables.shape[1], block_size,
        BLOCK=_ADVANCE_STEP_BLOCK,
    )  # fmt: skip
    return tokens, positions, lengths, slots


# Attention over the paged cache.
#
# A block number out of range turns the outputs that attend to it into NaN; with
# ``TRITON_DEBUG=1``, a device assert fails.


_paged_attention_kernels = Kernels("paged_attention")
_PAGED_ATTENTION_MAX_HEAD_SIZE = 256
_MAX_GROUP = 32
_MIN_SPLIT = 128  # keys; smaller splits are not worth a program
_MAX_SPLITS = 64
_PER_PROCESSOR = 4  # programs of a multiprocessor
_SHAPES_REASON = (
    f"shapes do not fit, heads are larger than {_PAGED_ATTENTION_MAX_HEAD_SIZE} or in groups of "
    f"more than {_MAX_GROUP}, rows of a cache are not contiguous, or window or soft_cap is not "
    "positive"
)


def _heads_fit(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    return (
        has_whole_rows(key_cache)
        and has_whole_rows(value_cache)
        and query.shape[1] // key_cache.shape[1] <= _MAX_GROUP
        and query.shape[2] <= _PAGED_ATTENTION_MAX_HEAD_SIZE
        and 0 < value_cache.shape[3] <= _PAGED_ATTENTION_MAX_HEAD_SIZE
    )


@implements(
    ops.paged_attention,
    on_device("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_seqlens_q")
    & ATTENDS
    & rules.custom(attention_fits, _SHAPES_REASON)
    & rules.custom(_heads_fit, _SHAPES_REASON),
    traits=(),  # not batch-invariant: the number of splits depends on the number of sequences
)
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, scale: float | None = None, causal: bool = True,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
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
        _paged_attention_kernels.attend, (tiles, key_heads, splits),
        parts, maxima, totals, query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q,
        size**-0.5 if scale is None else scale, soft_cap, window, splits, sequences, blocks, width,
        block_tables.stride(0), *query.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        heads, size, value_size,
        BLOCK_SIZE=block_size, GROUP=group, CAUSAL=causal, IS_SPLIT=splits > 1, QUERIES=queries,
        ROWS=rows, KEYS=keys, SIZE=max(block_of(size), 16),
        VALUE_SIZE=max(block_of(value_size), 16),
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_stages=3 if shared_memory(query.device) >= MANY_BYTES else 1,
    )  # fmt: skip
    if splits > 1:
        launch(
            _paged_attention_kernels.join, (tokens * heads,),
            out, parts, maxima, totals, value_size,
            SPLITS=splits, VALUE_SIZE=block_of(value_size),
        )  # fmt: skip
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
