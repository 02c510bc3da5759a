"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.rotary import rotary_embedding as op
from opweave.ir.traits import BATCH_INVARIANT, ROUNDS_LESS
from opweave.kernels.arguments import FLOATS
from opweave.kernels.vllm_c import library


def _fits(x_query: Tensor, x_key: Tensor, cos_sin_cache: Tensor, head_size: int) -> bool:
    size = cos_sin_cache.shape[-1]
    fits = all(
        (x.ndim == 3 and x.shape[-1] == head_size) or (x.ndim == 2 and x.shape[-1] % head_size == 0)
        for x in (x_query, x_key)
    )
    return fits and x_query.ndim == x_key.ndim and size <= head_size and size % 32 == 0


@library.implements(
    op,
    rules.cpu("x_query")
    & rules.dtype("x_query", *FLOATS)
    & rules.same_dtype("x_query", "x_key", "cos_sin_cache")
    & rules.dtype("positions", torch.int64)
    & rules.ndim("positions", 1)
    & rules.contiguous("x_query", "x_key", "positions", "cos_sin_cache")
    & rules.custom(_fits, "the heads, the table and the head size do not fit"),
    traits={BATCH_INVARIANT, ROUNDS_LESS},
)
def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys; the kernel writes over its inputs."""
    rows = len(cos_sin_cache)
    if positions.numel() and not -rows <= positions.min() <= positions.max() < rows:
        raise IndexError(f"a position is out of range for a table of {rows} rows")
    query, key = x_query.clone(), x_key.clone()
    # The kernel does not count negative positions from the end.
    positions = positions.where(positions >= 0, positions + rows)
    tokens = len(positions)
    heads = [each.view(tokens, each.numel() // tokens) if tokens else each for each in (query, key)]
    library.ops().rotary_embedding(positions, *heads, head_size, cos_sin_cache, is_neox_style)
    return query, key
