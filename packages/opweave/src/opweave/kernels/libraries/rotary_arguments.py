"""Arguments of ``rotary_embedding`` for the kernels of other libraries.

These kernels index the table themselves, without a check of the positions, and negative ones read
memory before it. They get the rows of the table that the positions select instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.rules import Rule


def angles(x_query: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return the cosines and sines of each token, ``(tokens, r)``, in the dtype of the queries."""
    return cos_sin_cache[positions].to(x_query.dtype)


def float32_angles(x_query: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return :func:`angles`, rounded to the dtype of the queries, in float32."""
    return angles(x_query, positions, cos_sin_cache).float()


def tokens(positions: Tensor) -> Tensor:
    """Return the row of :func:`angles` of each token."""
    return torch.arange(len(positions), device=positions.device)


def _fits(
    x_query: Tensor, x_key: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int
) -> bool:
    return (
        cos_sin_cache.ndim == 2
        and 0 < cos_sin_cache.shape[1] <= head_size
        and cos_sin_cache.shape[1] % 2 == 0
        and x_query.ndim == x_key.ndim
        and all(_has_heads(x, len(positions), head_size) for x in (x_query, x_key))
    )


def _has_heads(x: Tensor, count: int, head_size: int) -> bool:
    if x.ndim not in (2, 3) or x.shape[0] != count or 0 in x.shape[1:]:
        return False
    return math.prod(x.shape[1:]) % head_size == 0 and (x.ndim == 2 or x.shape[2] == head_size)


HEADS: Rule = (
    rules.ndim("positions", 1)
    & rules.dtype("positions", torch.int64, torch.int32)
    & rules.same_dtype("x_query", "x_key")
    & rules.same_device("x_query", "x_key", "positions", "cos_sin_cache")
    & rules.contiguous("x_query", "x_key")
    & rules.custom(_fits, "the heads, the table and the head size do not fit")
)
"""Contiguous heads, flat or split, and a position for each token."""
