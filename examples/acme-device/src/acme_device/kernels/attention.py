"""Attention: dense, packed, and over the paged cache; and what writes into that cache."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_device.kernels.floats import FLOATS
from opweave.ir import ops, rules
from opweave.ir.ops.attention import check_attention, check_heads, check_varlen, check_window

_DENSE = (
    rules.device("acme", "query", "key", "value")
    & rules.dtype("query", *FLOATS)
    & rules.same_dtype("query", "key", "value")
    & rules.unit_stride("query", "key", "value")
)


@ops.causal_attention.register_impl("acme", supports_args=_DENSE)
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_attention(query, key, value, True, window, "causal_attention")
    return _batched(query, key, value, scale, True, window, soft_cap)


@ops.bidirectional_attention.register_impl("acme", supports_args=_DENSE)
def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    check_attention(query, key, value, False, None, "bidirectional_attention")
    return _batched(query, key, value, scale, False, None, None)


@ops.varlen_attention.register_impl(
    "acme",
    supports_args=_DENSE
    & rules.device("acme", "cu_seqlens_q", "cu_seqlens_k")
    & rules.dtype("cu_seqlens_q", torch.int32)
    & rules.dtype("cu_seqlens_k", torch.int32)
    & rules.contiguous("cu_seqlens_q", "cu_seqlens_k"),
)
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, causal, window)
    attended: Tensor = torch.ops.acme.attention(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        _scale(query, scale),
        causal,
        window,
        soft_cap,
    )
    return attended


@ops.paged_attention.register_impl(
    "acme",
    supports_args=rules.device("acme", "query", "key_cache", "value_cache", "block_tables")
    & rules.device("acme", "seq_lens", "cu_seqlens_q")
    & rules.dtype("query", *FLOATS)
    & rules.same_dtype("query", "key_cache", "value_cache")
    & rules.unit_stride("query", "key_cache", "value_cache", "block_tables")
    & rules.contiguous("seq_lens", "cu_seqlens_q"),
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
    check_heads(query.shape[1], key_cache.shape[1], value_cache.shape[1], "paged_attention")
    check_window(causal, window, "paged_attention")
    attended: Tensor = torch.ops.acme.paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        _scale(query, scale),
        causal,
        window,
        soft_cap,
    )
    return attended


def _whole_rows(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool:
    return all(
        cache.ndim == 4 and (cache.is_contiguous() or _are_rows(cache))
        for cache in (key_cache, value_cache)
    )


def _are_rows(cache: Tensor) -> bool:
    """Whether *cache* is a part of each row, without gaps between the rows."""
    _, heads, block_size, size = cache.shape
    row = cache.stride(2)
    return row >= size and cache.stride() == (heads * block_size * row, block_size * row, row, 1)


@ops.reshape_and_cache.register_impl(
    "acme",
    supports_args=rules.device("acme", "key", "value", "key_cache", "value_cache", "slot_mapping")
    & rules.same_dtype("key", "key_cache")
    & rules.same_dtype("value", "value_cache")
    & rules.unit_stride("key", "value")
    & rules.contiguous("slot_mapping")
    & rules.ndim("slot_mapping", 1)
    & rules.custom(_whole_rows, "a cache is neither contiguous nor a part of contiguous rows"),
    inplace=True,
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    torch.ops.acme.reshape_and_cache_(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


def _batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Attend with ``(batch, length, heads, size)``: sequences of one length, packed."""
    packed: Tensor = torch.ops.acme.attention(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        _starts(query),
        _starts(key),
        _scale(query, scale),
        causal,
        window,
        soft_cap,
    )
    return packed.unflatten(0, query.shape[:2])


def _starts(x: Tensor) -> Tensor:
    batch, length = x.shape[:2]
    return (torch.arange(batch + 1, dtype=torch.int32) * length).to(x.device)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale
