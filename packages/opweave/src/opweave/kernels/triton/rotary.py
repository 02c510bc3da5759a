"""Rotary position embedding.

A position out of range gives NaN; with ``TRITON_DEBUG=1``, a device assert fails.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.rotary import rotary_embedding as op
from opweave.kernels.arguments import FLOATS
from opweave.kernels.triton.arguments import on_device
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.registration import block_of, implements

_kernels = Kernels("rotary")
_MAX_HEAD_SIZE = 1024
_TILE = 1024  # pairs per iteration


def _fits(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
) -> bool:
    return (
        1 <= head_size <= _MAX_HEAD_SIZE
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
    op,
    on_device("x_query", "x_key", "positions", "cos_sin_cache")
    & rules.dtype("x_query", *FLOATS)
    & rules.same_dtype("x_query", "x_key")
    & (rules.same_dtype("x_query", "cos_sin_cache") | rules.dtype("cos_sin_cache", torch.float32))
    & rules.dtype("positions", torch.int64, torch.int32)
    & rules.contiguous("positions")
    & rules.unit_stride("cos_sin_cache")
    & rules.custom(_fits, "heads, table and head size do not fit, or heads are not contiguous"),
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
        _kernels.rotary_embedding,
        (positions.numel(), 2),
        query,
        key,
        x_query,
        x_key,
        positions,
        cos_sin_cache,
        *strides,
        cos_sin_cache.stride(0),
        cos_sin_cache.shape[0],
        *counts,
        head_size,
        half,
        IS_NEOX=is_neox_style,
        HEADS=min(block_of(max(counts)), max(_TILE // block_of(half), 1)),
        HALF=block_of(half),
        REST=block_of(rest) if rest else 0,
    )
    return query, key
