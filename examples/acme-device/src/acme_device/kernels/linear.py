"""Products with weights, in the layout of checkpoints and in the device's own, and look-ups."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_device.kernels.floats import FLOATS
from acme_device.ops import acme_tiled_linear
from opweave.ir import ops, rules


@ops.linear.register_impl(
    "acme",
    supports_args=rules.device("acme", "x", "weight", "bias")
    & rules.dtype("x", *FLOATS)
    & rules.same_dtype("x", "weight", "bias")
    & rules.unit_stride("bias"),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = torch.ops.acme.linear(x, weight, bias)
    return output


@acme_tiled_linear.register_impl(
    "acme",
    supports_args=rules.device("acme", "x", "tiles", "bias")
    & rules.dtype("x", *FLOATS)
    & rules.same_dtype("x", "tiles", "bias")
    & rules.contiguous("tiles")
    & rules.unit_stride("bias"),
)
def tiled_linear(x: Tensor, tiles: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    output: Tensor = torch.ops.acme.tiled_linear(x, tiles, out_features, bias)
    return output


@ops.embedding.register_impl(
    "acme",
    supports_args=rules.device("acme", "input_ids", "weight")
    & rules.dtype("input_ids", torch.int32, torch.int64)
    & rules.ndim("weight", 2),
)
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    rows: Tensor = torch.ops.acme.embedding(input_ids, weight)
    return rows
