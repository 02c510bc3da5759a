"""Rotary position embedding, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_device.kernels.floats import FLOATS
from opweave.ir import ops, rules


@ops.rotary_embedding.register_impl(
    "acme",
    supports_args=rules.device("acme", "x_query", "x_key", "positions", "cos_sin_cache")
    & rules.dtype("x_query", *FLOATS)
    & rules.same_dtype("x_query", "x_key")
    & (rules.same_dtype("x_query", "cos_sin_cache") | rules.dtype("cos_sin_cache", torch.float32))
    & rules.dtype("positions", torch.int64)
    & rules.ndim("positions", 1)
    & rules.contiguous("positions", "cos_sin_cache")
    & rules.unit_stride("x_query", "x_key"),
    inplace=True,
)
def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    query, key = (x if x.ndim == 3 else x.unflatten(-1, (-1, head_size)) for x in (x_query, x_key))
    torch.ops.acme.rotary_embedding_(query, key, positions, cos_sin_cache, is_neox_style)
    return x_query, x_key
