"""Gated activations by the native module.

On the hot path of every layer, as in :mod:`opweave.kernels.opweave_c.norm`: each function calls the
C++ function directly, which refuses anything but plain CPU tensors; torch's dispatcher takes those.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops import activation as ops
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

_SUPPORTED = (
    rules.cpu("x")
    & rules.last_dim_multiple_of("x", 2)
    & rules.ndim("x", *range(1, 9))
    & rules.dtype("x", torch.float32, torch.bfloat16, torch.float16)
    & rules.unit_stride("x")
)
_KNOWN = rules.one_of("approximate", "none", "tanh")


def _half(x: Tensor) -> Tensor:
    """Return new memory for ``(..., d)`` from *x*, ``(..., 2 * d)``, strided as native's result."""
    *leading, width = x.shape
    if x.is_contiguous():
        return x.new_empty((*leading, width // 2))
    return torch.empty_like(x[..., : width // 2])


_silu_and_mul = direct("silu_and_mul")
_silu_and_mul_op = dispatched("silu_and_mul")


@ops.silu_and_mul.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x1) * x2`` for the halves of the last dimension of *x*."""
    out = _half(x)
    if is_dynamo_compiling():
        _silu_and_mul_op(out, x)
        return out
    try:
        _silu_and_mul(out, x)
    except TypeError:
        _silu_and_mul_op(out, x)
    return out


_mul_and_silu = direct("mul_and_silu")
_mul_and_silu_op = dispatched("mul_and_silu")


@ops.mul_and_silu.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def mul_and_silu(x: Tensor) -> Tensor:
    """Return ``x1 * silu(x2)`` for the halves of the last dimension of *x*."""
    out = _half(x)
    if is_dynamo_compiling():
        _mul_and_silu_op(out, x)
        return out
    try:
        _mul_and_silu(out, x)
    except TypeError:
        _mul_and_silu_op(out, x)
    return out


_gelu_and_mul = direct("gelu_and_mul")
_gelu_and_mul_op = dispatched("gelu_and_mul")


@ops.gelu_and_mul.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED & _KNOWN,
    traits={BATCH_INVARIANT},
)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    out = _half(x)
    if is_dynamo_compiling():
        _gelu_and_mul_op(out, x, approximate == "tanh")
        return out
    try:
        _gelu_and_mul(out, x, approximate == "tanh")
    except TypeError:
        _gelu_and_mul_op(out, x, approximate == "tanh")
    return out


_gelu_and_mul_sparse = direct("gelu_and_mul_sparse")
_gelu_and_mul_sparse_op = dispatched("gelu_and_mul_sparse")


@ops.gelu_and_mul_sparse.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED & _KNOWN,
    traits={BATCH_INVARIANT},
)
def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    """Return `gelu_and_mul` of what is far above the mean of its row."""
    out = _half(x)
    if is_dynamo_compiling():
        _gelu_and_mul_sparse_op(out, x, std_multiplier, approximate == "tanh")
        return out
    try:
        _gelu_and_mul_sparse(out, x, std_multiplier, approximate == "tanh")
    except TypeError:
        _gelu_and_mul_sparse_op(out, x, std_multiplier, approximate == "tanh")
    return out


_fatrelu_and_mul = direct("fatrelu_and_mul")
_fatrelu_and_mul_op = dispatched("fatrelu_and_mul")


@ops.fatrelu_and_mul.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """Return ``(x1 if x1 > threshold else 0) * x2`` for the halves of the last dimension."""
    out = _half(x)
    if is_dynamo_compiling():
        _fatrelu_and_mul_op(out, x, threshold)
        return out
    try:
        _fatrelu_and_mul(out, x, threshold)
    except TypeError:
        _fatrelu_and_mul_op(out, x, threshold)
    return out


_swigluoai_and_mul = direct("swigluoai_and_mul")
_swigluoai_and_mul_op = dispatched("swigluoai_and_mul")


@ops.swigluoai_and_mul.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Return the clamped gated product of the pairs in the last dimension of *x*."""
    out = _half(x)
    if is_dynamo_compiling():
        _swigluoai_and_mul_op(out, x, alpha, limit)
        return out
    try:
        _swigluoai_and_mul(out, x, alpha, limit)
    except TypeError:
        _swigluoai_and_mul_op(out, x, alpha, limit)
    return out
