"""Element by element: an op of opweave, and one of the device's own."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_device.kernels.floats import FLOATS
from acme_device.ops import acme_scaled_residual
from opweave.ir import ops, rules


@ops.silu_and_mul.register_impl(
    "acme",
    supports_args=rules.device("acme", "x") & rules.dtype("x", *FLOATS) & rules.contiguous("x"),
)
def silu_and_mul(x: Tensor) -> Tensor:
    activated: Tensor = torch.ops.acme.silu_and_mul(x)
    return activated


@acme_scaled_residual.register_impl(
    "acme",
    supports_args=rules.device("acme", "x", "residual")
    & rules.dtype("x", *FLOATS)
    & rules.same_dtype("x", "residual")
    & rules.same_shape("x", "residual")
    & rules.contiguous("x", "residual"),
)
def scaled_residual(x: Tensor, residual: Tensor, scale: float) -> Tensor:
    total: Tensor = torch.ops.acme.scaled_residual(x, residual, scale)
    return total
