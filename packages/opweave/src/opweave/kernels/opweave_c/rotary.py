"""Rotary position embedding, also fused with writing into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.donation import clone_in_layout
from opweave.ir.rules import ALIAS_SAFE, BATCH_INVARIANT
from opweave.kernels.arguments import FLOATS, has_whole_rows
from opweave.kernels.opweave_c.calls import MAX_DIMS, implements, in_memory_order, native_op

# Rotary position embedding, in-place if possible.
#
# A position out of range raises RuntimeError before anything is written. A negative position
# counts from the end of the table, as in native.


_MAX_ROTARY_SIZE = 1024

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format

_rotary = native_op("rotary_embedding")
_norm_rope = native_op("qk_norm_rope")


def rotary_fits(
    x_query: Tensor, x_key: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int
) -> bool:
    """Return whether heads, table and head size are compatible, and the heads in memory order."""
    table, tokens = cos_sin_cache.shape, positions.shape
    rank = len(tokens)
    if len(table) != 2 or table[1] % 2 or table[1] > _MAX_ROTARY_SIZE:
        return False
    if head_size < 1 or table[1] > head_size or x_query is x_key:
        return False
    for x in (x_query, x_key):
        shape = x.shape
        if len(shape) == rank + 1:
            fits = shape[-1] % head_size == 0
        else:
            fits = len(shape) == rank + 2 and shape[-1] == head_size
        if not fits or len(shape) > MAX_DIMS or shape[:rank] != tokens:
            return False
        if not in_memory_order(x):  # a copy would not have the strides of native's result
            return False
    return True


def _weights_fit(query_weight: Tensor | None, key_weight: Tensor | None, head_size: int) -> bool:
    return (query_weight is None or query_weight.shape == (head_size,)) and (
        key_weight is None or key_weight.shape == (head_size,)
    )


_TENSORS = ("x_query", "x_key", "positions", "cos_sin_cache")
_SHAPES_REASON = (
    "the heads, the table and the head size do not fit, the heads are not in memory order, "
    f"or there are more than {MAX_DIMS} dimensions"
)
_COMMON = (
    rules.dtype("x_query", *FLOATS)
    & rules.same_dtype("x_query", "x_key")
    & (rules.same_dtype("x_query", "cos_sin_cache") | rules.dtype("cos_sin_cache", torch.float32))
    & rules.dtype("positions", torch.int64, torch.int32)
    & rules.contiguous("positions")
    & rules.unit_stride("x_query", "x_key", "cos_sin_cache")
)
_WEIGHTS = (
    rules.same_dtype("x_query", "query_weight", "key_weight")
    | (rules.dtype("query_weight", torch.float32) & rules.dtype("key_weight", torch.float32))
) & rules.unit_stride("query_weight", "key_weight")


def _rotated(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    query, key = new_like(x_query), new_like(x_key)
    _rotary(query, key, x_query, x_key, positions, cos_sin_cache, head_size, is_neox_style)
    return query, key


@implements(
    ops.rotary_embedding,
    rules.cpu(*_TENSORS) & _COMMON & rules.custom(rotary_fits, _SHAPES_REASON),
    inplace=True,
    functional=_rotated,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
)
def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of *x_query* and *x_key*, in-place if both are contiguous."""
    rest = (positions, cos_sin_cache, head_size, is_neox_style)
    if not (x_query.is_contiguous() and x_key.is_contiguous()):
        return _rotated(x_query, x_key, *rest)  # with native's strides
    try:
        _rotary(x_query, x_key, x_query, x_key, *rest)
    except RuntimeError:
        pass  # tensors overlap, or the arguments are invalid and the next call raises
    else:
        return x_query, x_key
    return _rotated(x_query, x_key, *rest)


def _normed_and_rotated(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    query, key = new_like(x_query), new_like(x_key)
    weights = (query_weight, key_weight, epsilon)
    rest = (positions, cos_sin_cache, *weights, head_size, is_neox_style)
    _norm_rope(query, key, x_query, x_key, *rest)
    return query, key


@implements(
    ops.qk_norm_rope,
    rules.cpu(*_TENSORS, "query_weight", "key_weight")
    & _COMMON
    & _WEIGHTS
    & rules.custom(rotary_fits, _SHAPES_REASON)
    & rules.custom(_weights_fit, _SHAPES_REASON),
    inplace=True,
    functional=_normed_and_rotated,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
)
def qk_norm_rope(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Normalize and rotate the heads of *x_query* and *x_key*, in-place if contiguous."""
    weights = (query_weight, key_weight, epsilon)
    rest = (positions, cos_sin_cache, *weights, head_size, is_neox_style)
    if x_query.is_contiguous() and x_key.is_contiguous():
        try:
            _norm_rope(x_query, x_key, x_query, x_key, *rest)
        except RuntimeError:
            pass  # as in rotary_embedding
        else:
            return x_query, x_key
    return _normed_and_rotated(x_query, x_key, *rest)


def new_like(x: Tensor) -> Tensor:
    """Return an empty tensor for the rotated *x*, with the strides that native returns."""
    return _empty_like(x, memory_format=_contiguous)


# Rotary position embedding fused with writing into the paged cache.
#
# A slot or position out of range raises RuntimeError before anything is written.


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
    ops.rope_reshape_and_cache,
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
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cos_sin_cache: Tensor,
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
