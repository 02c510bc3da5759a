"""RMS normalisation by the native module.

These functions are on the hot path of every decoded token. They call the C++ function directly and
leave it to that function to refuse anything but plain CPU tensors, so that a plain call pays for no
check in Python; torch's dispatcher then takes what it refused (fake tensors, subclasses).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave import ir, native
from opweave.ir import rules

_STATUS = native.status()
_empty_like = torch.empty_like  # saves the lookup on every call
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _direct(name: str) -> Callable[..., Any]:
    """Return op *name*'s cheapest door that is open in eager mode."""
    if _STATUS.fast_door:
        function: Callable[..., Any] = getattr(native.module(), name, _unavailable)
        return function
    return _dispatched(name)


def _dispatched(name: str) -> Callable[..., Any]:
    if not _STATUS.available:
        return _unavailable
    op: Callable[..., Any] = getattr(torch.ops.opweave_c, name).default
    return op


def _unavailable(*arguments: object) -> None:
    raise RuntimeError(f"The native ops are not available: {_STATUS.reason_missing}.")


_rms_norm = _direct("rms_norm")
_rms_norm_op = _dispatched("rms_norm")
_fused_add_rms_norm = _direct("fused_add_rms_norm")
_fused_add_rms_norm_op = _dispatched("fused_add_rms_norm")


def _separate(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        x is not x_residual
        and (x.is_contiguous() or 0 not in x.stride())
        and (x_residual.is_contiguous() or 0 not in x_residual.stride())
    )


_COMMON = (
    rules.is_none("variance_size")
    & rules.per_last_dim("weight", "x")
    & rules.dtype("x", *_FLOATS)
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.unit_stride("x", "weight")
)


@ir.ops.rms_norm.register_impl(
    "opweave_c",
    supported=_STATUS.available,
    unsupported_reason=_STATUS.reason_missing,
    supports_args=rules.cpu("x", "weight") & _COMMON,
    traits={"batch_invariant"},
)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Normalise the rows of *x* (``[..., h]``) into a new tensor; *weight* is None or ``[h]``."""
    out = _empty_like(x)
    if is_dynamo_compiling():
        _rms_norm_op(out, x, weight, epsilon)
        return out
    try:
        _rms_norm(out, x, weight, epsilon)
    except TypeError:
        _rms_norm_op(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(
    "opweave_c",
    supported=_STATUS.available,
    unsupported_reason=_STATUS.reason_missing,
    supports_args=rules.cpu("x", "x_residual", "weight")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.unit_stride("x_residual")
    & _COMMON
    & rules.custom(_separate, "x and x_residual are not separate memory"),
    inplace=True,
    traits={"batch_invariant"},
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add *x* to *x_residual* (both ``[..., h]``), then normalise the sum into *x*, in place."""
    if is_dynamo_compiling():
        _fused_add_rms_norm_op(x, x_residual, weight, epsilon)
        return x, x_residual
    try:
        _fused_add_rms_norm(x, x_residual, weight, epsilon)
    except TypeError:
        _fused_add_rms_norm_op(x, x_residual, weight, epsilon)
    return x, x_residual
