"""Argument rules for paged KV cache kernels on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.kernels.arguments import FLOATS


def has_whole_heads(cache: Tensor) -> bool:
    """Return whether the positions of each head in a block are contiguous.

    Blocks and heads may have any strides, as in one tensor for both keys and values.

    Args:
        cache: ``(blocks, heads, block_size, head_size)``.
    """
    _, _, block_size, size = cache.shape
    return has_whole_rows(cache) and (block_size == 1 or cache.stride(2) == size)


def has_whole_rows(cache: Tensor) -> bool:
    """Return whether the elements of each position and head of a cache are contiguous."""
    return cache.shape[3] == 1 or cache.stride(3) == 1


def _tokens_fit(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool:
    return (
        key_cache is not value_cache
        and key_cache.shape[:3] == value_cache.shape[:3]
        and _takes(key_cache, key)
        and _takes(value_cache, value)
        and key.shape[0] == slot_mapping.shape[0] == value.shape[0]
    )


def _takes(cache: Tensor, x: Tensor) -> bool:
    """Return whether the rows of *cache* are contiguous and have the shape of tokens of *x*."""
    _, heads, _, size = cache.shape
    return x.shape[1:] == (heads, size) and has_whole_rows(cache)


WRITES = (
    rules.dtype("key", *FLOATS)
    & rules.same_dtype("key", "value", "key_cache", "value_cache")
    & rules.dtype("slot_mapping", torch.int64)
    & rules.ndim("key", 3)
    & rules.ndim("value", 3)
    & rules.ndim("key_cache", 4)
    & rules.ndim("value_cache", 4)
    & rules.ndim("slot_mapping", 1)
    & rules.contiguous("slot_mapping")
    & rules.unit_stride("key", "value")
    & rules.custom(
        _tokens_fit, "tokens and caches do not fit, or rows of a cache are not contiguous"
    )
)
"""The rules of ``reshape_and_cache``."""

ATTENDS = (
    rules.dtype("query", *FLOATS)
    & rules.same_dtype("query", "key_cache", "value_cache")
    & rules.dtype("block_tables", torch.int32)
    & rules.same_dtype("block_tables", "seq_lens", "cu_seqlens_q")
    & rules.ndim("query", 3)
    & rules.ndim("key_cache", 4)
    & rules.ndim("value_cache", 4)
    & rules.ndim("block_tables", 2)
    & rules.unit_stride("query", "block_tables")
    & rules.contiguous("seq_lens", "cu_seqlens_q")
)
"""The rules of ``paged_attention``, in addition to :func:`attention_fits`."""


def attention_fits(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> bool:
    """Return whether the shapes are compatible and the options are positive.

    The arguments must satisfy :data:`ATTENDS`.
    """
    _, heads, block_size, size = key_cache.shape
    sequences = block_tables.shape[0]
    return (
        heads > 0
        and query.shape[1] % heads == 0
        and query.shape[2] == size > 0
        and block_size > 0
        and value_cache.shape[:3] == key_cache.shape[:3]
        and seq_lens.shape == (sequences,)
        and cu_seqlens_q.shape == (sequences + 1,)
        and (window is None or (causal and window > 0))
        and (soft_cap is None or soft_cap > 0)
    )
