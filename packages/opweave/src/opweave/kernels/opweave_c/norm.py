"""RMS norms."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave import ir
from opweave.ir import rules
from opweave.kernels.arguments import FLOATS
from opweave.kernels.opweave_c.arguments import HAS_DIMS
from opweave.kernels.opweave_c.call_paths import implements, native_op

_empty_like = torch.empty_like  # saves an attribute lookup on every call

_rms_norm = native_op("rms_norm")
_add_rms_norm = native_op("add_rms_norm")
_fused_add_rms_norm = native_op("fused_add_rms_norm")


def _separate(x: Tensor, x_residual: Tensor) -> bool:
    return (
        x is not x_residual
        and (x.is_contiguous() or 0 not in x.stride())
        and (x_residual.is_contiguous() or 0 not in x_residual.stride())
    )


_COMMON = (
    rules.is_none("variance_size")
    & rules.per_last_dim("weight", "x")
    & rules.dtype("x", *FLOATS)
    & HAS_DIMS
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.unit_stride("x", "weight")
)


@implements(ir.ops.rms_norm, rules.cpu("x", "weight") & _COMMON)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Normalize the rows of *x* (``[..., h]``) into a new tensor; *weight* is None or ``[h]``."""
    out = _empty_like(x)
    _rms_norm(out, x, weight, epsilon)
    return out


def _added_and_normed(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    out, total = _empty_like(x), _empty_like(x)
    _add_rms_norm(out, total, x, x_residual, weight, epsilon)
    return out, total


@implements(
    ir.ops.fused_add_rms_norm,
    rules.cpu("x", "x_residual", "weight")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.unit_stride("x_residual")
    & _COMMON
    & rules.custom(_separate, "x and x_residual share memory, or are expanded"),
    inplace=True,
    functional=_added_and_normed,
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add *x* to *x_residual* in-place (both ``[..., h]``), and normalize the sum into *x*."""
    _fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
