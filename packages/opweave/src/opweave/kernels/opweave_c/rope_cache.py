"""Rotary position embedding fused with writing into the paged cache.

A slot or position out of range raises RuntimeError before anything is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.memory import clone_in_layout
from opweave.ir.ops.kv_cache import rope_reshape_and_cache as op
from opweave.ir.traits import ALIAS_SAFE, BATCH_INVARIANT
from opweave.kernels.arguments import FLOATS
from opweave.kernels.opweave_c.call_paths import implements, native_op
from opweave.kernels.opweave_c.rotary import new_like, rotary_fits
from opweave.kernels.paged import has_whole_rows

_rotate_and_write = native_op("rope_reshape_and_cache")


def _fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    head_size: int,
) -> bool:
    _, heads, _, size = key_cache.shape
    tokens = slot_mapping.shape[0]
    return (
        positions.shape[0] == tokens
        and size == head_size
        and rotary_fits(query, key, positions, cos_sin_cache, head_size)
        and key.shape[1] == (heads if key.ndim == 3 else heads * head_size)
        and value.shape == (tokens, heads, value_cache.shape[3])
        and key_cache is not value_cache
        and key_cache.shape[:3] == value_cache.shape[:3]
        and has_whole_rows(key_cache)
        and has_whole_rows(value_cache)
    )


@implements(
    op,
    rules.cpu(
        *("query", "key", "value", "positions", "cos_sin_cache"),
        *("key_cache", "value_cache", "slot_mapping"),
    )
    & rules.dtype("query", *FLOATS)
    & rules.same_dtype("query", "key", "value", "key_cache", "value_cache")
    & (rules.same_dtype("query", "cos_sin_cache") | rules.dtype("cos_sin_cache", torch.float32))
    & rules.dtype("positions", torch.int64, torch.int32)
    & rules.dtype("slot_mapping", torch.int64)
    & rules.ndim("positions", 1)
    & rules.ndim("slot_mapping", 1)
    & rules.ndim("value", 3)
    & rules.ndim("key_cache", 4)
    & rules.ndim("value_cache", 4)
    & rules.contiguous("positions", "slot_mapping")
    & rules.unit_stride("query", "key", "value", "cos_sin_cache")
    & rules.custom(
        _fits,
        "heads, table, caches and head size do not fit, heads are not in memory order, "
        "or rows of a cache are not contiguous",
    ),
    inplace=True,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
)
def rope_reshape_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate *query* and *key*, and write *key* and *value* into the caches in-place.

    *query* is rotated in-place if it is contiguous.
    """
    rest = (slot_mapping, head_size, is_neox_style)
    tokens = (query, key, value, positions, cos_sin_cache)
    # Native returns a contiguous query, so slices of a wider projection cannot be reused.
    out = query if query.is_contiguous() else new_like(query)
    try:
        _rotate_and_write(out, *tokens, key_cache, value_cache, *rest)
    except RuntimeError:
        pass  # tensors overlap, or the arguments are invalid and the next call raises
    else:
        return out, key_cache, value_cache
    out = new_like(query)
    key_cache, value_cache = clone_in_layout(key_cache), clone_in_layout(value_cache)
    _rotate_and_write(out, *tokens, key_cache, value_cache, *rest)
    return out, key_cache, value_cache
