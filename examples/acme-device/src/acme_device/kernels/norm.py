"""Norms. If a kernel's rule rejects the arguments, opweave tries the next provider."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_device.kernels.floats import FLOATS
from opweave.ir import ops, rules

_NORM = (
    rules.dtype("x", *FLOATS)
    & rules.is_none("variance_size")
    & rules.per_last_dim("weight", "x")
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.unit_stride("weight")
)


@ops.rms_norm.register_impl("acme", supports_args=rules.device("acme", "x", "weight") & _NORM)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    normed: Tensor = torch.ops.acme.rms_norm(x, weight, epsilon)
    return normed


def _separate(x: Tensor, x_residual: Tensor) -> bool:
    return x is not x_residual


@ops.fused_add_rms_norm.register_impl(
    "acme",
    supports_args=rules.device("acme", "x", "x_residual", "weight")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.contiguous("x", "x_residual")
    & _NORM
    & rules.custom(_separate, "x and x_residual are one tensor"),
    inplace=True,
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops.acme.add_rms_norm_(x, x_residual, weight, epsilon)
    return x, x_residual
