"""Rotary position embedding by the native module, in place.

A position outside of the table is a RuntimeError, and nothing has been changed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops.rotary import qk_norm_rope as qk_norm_rope_op
from opweave.ir.ops.rotary import rotary_embedding as rotary_embedding_op
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_ROTARY_SIZE = 1024

_rotary = direct("rotary_embedding")
_rotary_op = dispatched("rotary_embedding")
_norm_rope = direct("qk_norm_rope")
_norm_rope_op = dispatched("qk_norm_rope")


def _fits(
    x_query: Tensor, x_key: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int
) -> bool:
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
        if not fits or shape[:rank] != tokens:
            return False
        # A copy has the strides of native's result only if the order of its dimensions is that of
        # memory.
        if not (x.is_contiguous() or _is_nested(shape, x.stride())):
            return False
    return True


def _is_nested(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reach = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride < reach:
                return False
            reach = stride * size
    return True


def _rotary_fits(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> bool:
    return _fits(x_query, x_key, positions, cos_sin_cache, head_size)


def _norm_rope_fits(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    head_size: int,
    is_neox_style: bool = True,
) -> bool:
    return (
        _fits(x_query, x_key, positions, cos_sin_cache, head_size)
        and (query_weight is None or query_weight.shape == (head_size,))
        and (key_weight is None or key_weight.shape == (head_size,))
    )


_TENSORS = ("x_query", "x_key", "positions", "cos_sin_cache")
_WHY = "the heads, the table and the head size do not fit, or the heads are not in memory order"
_COMMON = (
    rules.dtype("x_query", *_FLOATS)
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


@rotary_embedding_op.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=rules.cpu(*_TENSORS) & _COMMON & rules.custom(_rotary_fits, _WHY),
    inplace=True,
    traits={"alias_safe", "batch_invariant"},
)
def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of *x_query* and *x_key* by the angles of their *positions*, in place."""
    arguments = (
        x_query,
        x_key,
        x_query,
        x_key,
        positions,
        cos_sin_cache,
        head_size,
        is_neox_style,
    )
    if is_dynamo_compiling():
        _rotary_op(*arguments)
        return x_query, x_key
    try:
        _rotary(*arguments)
    except TypeError:
        _rotary_op(*arguments)
    return x_query, x_key


@qk_norm_rope_op.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=rules.cpu(*_TENSORS, "query_weight", "key_weight")
    & _COMMON
    & _WEIGHTS
    & rules.custom(_norm_rope_fits, _WHY),
    inplace=True,
    traits={"alias_safe", "batch_invariant"},
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
    """Normalise and rotate the heads of *x_query* and *x_key*, in place."""
    arguments = (
        x_query,
        x_key,
        x_query,
        x_key,
        positions,
        cos_sin_cache,
        query_weight,
        key_weight,
        epsilon,
        head_size,
        is_neox_style,
    )
    if is_dynamo_compiling():
        _norm_rope_op(*arguments)
        return x_query, x_key
    try:
        _norm_rope(*arguments)
    except TypeError:
        _norm_rope_op(*arguments)
    return x_query, x_key
