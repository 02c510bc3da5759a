"""Attention over the paged cache, writes into it, and the inputs of the next decode step."""

from __future__ import annotations

import torch
from torch import SymInt, Tensor

from opweave import _custom_ops
from opweave.ir import ops, rules
from opweave.ir.donation import clone_in_layout
from opweave.ir.rules import ALIAS_SAFE, BATCH_INVARIANT
from opweave.kernels.arguments import ATTENDS, WRITES, attention_fits, has_whole_heads
from opweave.kernels.opweave_c.calls import implements, native_op, one_float32
from opweave.kernels.wrap import mutating

# Write keys and values into the paged cache, in-place.
#
# A slot out of range raises RuntimeError before anything is written.


_write = native_op("reshape_and_cache")


@implements(
    ops.reshape_and_cache,
    rules.cpu("key", "value", "key_cache", "value_cache", "slot_mapping") & WRITES,
    inplace=True,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write *key* and *value* into their slots of the caches, in-place."""
    try:
        _write(key, value, key_cache, value_cache, slot_mapping)
    except RuntimeError:
        pass  # a cache overlaps something, or the arguments are invalid and the next call raises
    else:
        return key_cache, value_cache
    key_cache, value_cache = clone_in_layout(key_cache), clone_in_layout(value_cache)
    _write(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


# Advance the decode inputs of all sequences by one token, in-place.


_UPDATED = ("input_tokens", "input_positions", "seq_lens", "slot_mapping")
_TENSORS = (*_UPDATED, "sampled_token_ids", "block_tables")


def _separate(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
) -> bool:
    updated = (input_tokens, input_positions, seq_lens, slot_mapping)
    others = (sampled_token_ids, block_tables)
    return len({*map(id, updated), *map(id, others)}) == len(_TENSORS)


@implements(
    ops.advance_step_flashattn,
    rules.cpu(*_TENSORS)
    & rules.ndim("seq_lens", 1)
    & rules.ndim("sampled_token_ids", 1, 2)
    & rules.contiguous(*_UPDATED)
    & rules.unit_stride("block_tables")
    & rules.custom(_separate, "one tensor is passed twice"),
    inplace=True,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
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
    """Advance every sequence in-place, and return the four updated tensors."""
    updated = (input_tokens, input_positions, seq_lens, slot_mapping)
    rest = (sampled_token_ids, block_tables, block_size)
    sizes = (seq_lens.shape[0], sampled_token_ids.shape[0])
    advance = _with_any_sizes if any(isinstance(s, SymInt) for s in sizes) else _with_sizes
    try:
        advance(*updated, *rest)
    except RuntimeError:
        pass  # tensors overlap, or the arguments are invalid and the next call raises
    else:
        return updated
    tokens, positions, lengths, slots = (tensor.clone() for tensor in updated)
    try:
        advance(tokens, positions, lengths, slots, *rest)
    except RuntimeError as error:  # native raises ValueError
        raise ValueError(str(error)) from error
    return tokens, positions, lengths, slots


def _with_sizes(
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slots: Tensor,
    sampled: Tensor,
    tables: Tensor,
    block_size: int,
) -> None:
    count, queries = lengths.shape[0], sampled.shape[0]
    _custom_ops.advance_step_flashattn(
        count, queries, block_size, tokens, sampled, positions, lengths, slots, tables
    )


# For dynamic shapes: the native op takes sizes as plain integers, which would be specialized.
_with_any_sizes = mutating(
    "opweave_c_sizes",
    "advance_step(Tensor(a!) input_tokens, Tensor(b!) input_positions, Tensor(c!) seq_lens, "
    "Tensor(d!) slot_mapping, Tensor sampled_token_ids, Tensor block_tables, int block_size) "
    "-> ()",
)(_with_sizes)


# Attention over the paged cache.
#
# A sequence length or block number out of range raises RuntimeError.


_BLOCK_STEP = 16

_empty = torch.empty

_attend = native_op("paged_attention")
_attend_and_quantize = native_op("attention_quant")


def _blocks_fit(key_cache: Tensor, value_cache: Tensor) -> bool:
    return (
        key_cache.shape[2] % _BLOCK_STEP == 0
        and has_whole_heads(key_cache)
        and has_whole_heads(value_cache)
    )


_SHAPES_REASON = (
    "shapes do not fit, block_size is not a multiple of 16, positions of a head are not contiguous "
    "in a block, or window or soft_cap is not positive"
)
_COMMON = (
    rules.cpu("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_seqlens_q")
    & ATTENDS
    & rules.custom(attention_fits, _SHAPES_REASON)
    & rules.custom(_blocks_fit, _SHAPES_REASON)
)


@implements(ops.paged_attention, _COMMON)
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, scale: float | None = None, causal: bool = True,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of each query over its sequence: ``(tokens, heads, size)``."""
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    scale = query.shape[2] ** -0.5 if scale is None else scale
    _attend(
        out, query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q,
        scale, causal, window, soft_cap,
    )  # fmt: skip
    return out


@implements(ops.attention_quant, _COMMON & one_float32("out_scale"))
def attention_quant(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, out_scale: Tensor, scale: float | None = None, causal: bool = True,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of each query, quantized by *out_scale*: ``(tokens, heads * size)``."""
    width = query.shape[1] * value_cache.shape[3]
    out = _empty(query.shape[0], width, dtype=torch.float8_e4m3fn)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    _attend_and_quantize(
        out, query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, out_scale,
        scale, causal, window, soft_cap,
    )  # fmt: skip
    return out
