"""Activations of single elements by the native module.

On the hot path of every layer, as in :mod:`opweave.kernels.opweave_c.norm`: each function calls the
C++ function directly, which refuses anything but plain CPU tensors; torch's dispatcher takes those.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops import pointwise as ops
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

_empty_like = torch.empty_like
_SUPPORTED = (
    rules.cpu("x")
    & rules.ndim("x", *range(1, 9))
    & rules.dtype("x", torch.float32, torch.bfloat16, torch.float16)
    & rules.unit_stride("x")
)


def _are_numbers(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> bool:
    return alpha_p.numel() == alpha_n.numel() == 1 and max(alpha_p.ndim, alpha_n.ndim) <= 8


_NUMBERS = (
    rules.cpu("alpha_p", "alpha_n")
    & rules.same_dtype("x", "alpha_p", "alpha_n")
    & rules.custom(_are_numbers, "alpha_p or alpha_n is not one number")
)

_gelu_new = direct("gelu_new")
_gelu_new_op = dispatched("gelu_new")


@ops.gelu_new.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def gelu_new(x: Tensor) -> Tensor:
    """Return GELU by tanh."""
    out = _empty_like(x)
    if is_dynamo_compiling():
        _gelu_new_op(out, x)
        return out
    try:
        _gelu_new(out, x)
    except TypeError:
        _gelu_new_op(out, x)
    return out


_gelu_fast = direct("gelu_fast")
_gelu_fast_op = dispatched("gelu_fast")


@ops.gelu_fast.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def gelu_fast(x: Tensor) -> Tensor:
    """Return GELU by tanh, factored."""
    out = _empty_like(x)
    if is_dynamo_compiling():
        _gelu_fast_op(out, x)
        return out
    try:
        _gelu_fast(out, x)
    except TypeError:
        _gelu_fast_op(out, x)
    return out


_quick_gelu = direct("quick_gelu")
_quick_gelu_op = dispatched("quick_gelu")


@ops.quick_gelu.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def quick_gelu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(1.702 * x)``."""
    out = _empty_like(x)
    if is_dynamo_compiling():
        _quick_gelu_op(out, x)
        return out
    try:
        _quick_gelu(out, x)
    except TypeError:
        _quick_gelu_op(out, x)
    return out


_relu2 = direct("relu2")
_relu2_op = dispatched("relu2")


@ops.relu2.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED,
    traits={BATCH_INVARIANT},
)
def relu2(x: Tensor) -> Tensor:
    """Return ``relu(x) ** 2``."""
    out = _empty_like(x)
    if is_dynamo_compiling():
        _relu2_op(out, x)
        return out
    try:
        _relu2(out, x)
    except TypeError:
        _relu2_op(out, x)
    return out


_xielu = direct("xielu")
_xielu_op = dispatched("xielu")


@ops.xielu.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_SUPPORTED & _NUMBERS,
    traits={BATCH_INVARIANT},
)
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """Return xIELU with the learned numbers *alpha_p* and *alpha_n*."""
    out = _empty_like(x)
    if is_dynamo_compiling():
        _xielu_op(out, x, alpha_p, alpha_n, beta, eps)
        return out
    try:
        _xielu(out, x, alpha_p, alpha_n, beta, eps)
    except TypeError:
        _xielu_op(out, x, alpha_p, alpha_n, beta, eps)
    return out
