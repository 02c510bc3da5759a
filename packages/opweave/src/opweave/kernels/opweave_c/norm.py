"""Norms: RMS, gated and layer norm."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.arguments import FLOATS
from opweave.kernels.opweave_c.calls import HAS_DIMS, ROWS, implements, native_op

# RMS norms.


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


@implements(ops.rms_norm, rules.cpu("x", "weight") & _COMMON)
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
    ops.fused_add_rms_norm,
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


# Gated RMS norm.


_rms_norm_gated = native_op("rms_norm_gated")


def _groups_fit(x: Tensor, group_size: int | None) -> bool:
    width = x.shape[-1]
    return width > 0 if group_size is None else group_size > 0 and width % group_size == 0


@implements(
    ops.rms_norm_gated,
    ROWS
    & rules.cpu("weight", "z")
    & rules.per_last_dim("weight", "x")
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.same_dtype("x", "z")
    & rules.same_shape("x", "z")
    & rules.unit_stride("weight", "z")
    # With more dimensions, the strides of native's result depend on both x and z.
    & (rules.ndim("x", 1, 2) | rules.contiguous("x", "z"))
    & rules.one_of("activation", "silu", "swish", "sigmoid")
    & rules.custom(_groups_fit, "group_size does not divide the last dimension of x"),
)
def rms_norm_gated(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Normalize the rows of *x* (``[..., h]``) after or before multiplying with the gate."""
    out = _empty_like(x)
    size = x.shape[-1] if group_size is None else group_size
    _rms_norm_gated(out, x, weight, z, epsilon, size, norm_before_gate, activation == "sigmoid")
    return out


# Layer norm.


_contiguous = torch.contiguous_format
_layer_norm = native_op("layer_norm")


@implements(
    ops.layer_norm,
    ROWS
    & rules.cpu("weight", "bias")
    & rules.per_last_dim("weight", "x")
    & rules.per_last_dim("bias", "x")
    & (
        rules.same_dtype("x", "weight", "bias")
        | (rules.dtype("weight", torch.float32) & rules.dtype("bias", torch.float32))
    )
    & rules.unit_stride("weight", "bias"),
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Normalize the rows of *x* (``[..., h]``) into a new tensor."""
    out = _empty_like(x, memory_format=_contiguous)
    _layer_norm(out, x, weight, bias, epsilon)
    return out
