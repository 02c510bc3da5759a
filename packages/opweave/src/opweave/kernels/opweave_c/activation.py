"""Activations, gated and pointwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opweave.ir import IrOp, ops, rules
from opweave.ir.rules import Rule
from opweave.kernels.opweave_c.calls import ROWS, half_of, implements, native_op

# Gated activations.


_GATED = ROWS & rules.last_dim_multiple_of("x", 2)
_APPROXIMATE = rules.one_of("approximate", "none", "tanh")

_gelu_and_mul = native_op("gelu_and_mul")
_gelu_and_mul_sparse = native_op("gelu_and_mul_sparse")
_fatrelu_and_mul = native_op("fatrelu_and_mul")
_swigluoai_and_mul = native_op("swigluoai_and_mul")


def _unary(
    op: IrOp, supports_args: Rule, new: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Register the native op of the same name, which takes an output and *x*; return the function.

    Args:
        new: returns an empty output for *x*.
    """
    run = native_op(op.name)

    @implements(op, supports_args)
    def activation(x: Tensor) -> Tensor:
        out = new(x)
        run(out, x)
        return out

    return activation


silu_and_mul = _unary(ops.silu_and_mul, _GATED, half_of)
mul_and_silu = _unary(ops.mul_and_silu, _GATED, half_of)


@implements(ops.gelu_and_mul, _GATED & _APPROXIMATE)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    out = half_of(x)
    _gelu_and_mul(out, x, approximate == "tanh")
    return out


@implements(ops.gelu_and_mul_sparse, _GATED & _APPROXIMATE)
def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    """Return ``gelu(relu(x1 - c)) * x2``, where ``c = mean(x1) + std_multiplier * std(x1)``."""
    out = half_of(x)
    _gelu_and_mul_sparse(out, x, std_multiplier, approximate == "tanh")
    return out


@implements(ops.fatrelu_and_mul, _GATED)
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """Return ``(x1 if x1 > threshold else 0) * x2`` for the halves of the last dimension."""
    out = half_of(x)
    _fatrelu_and_mul(out, x, threshold)
    return out


@implements(ops.swigluoai_and_mul, _GATED)
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Return the clamped SwiGLU of the interleaved pairs in the last dimension of *x*."""
    out = half_of(x)
    _swigluoai_and_mul(out, x, alpha, limit)
    return out


# Pointwise activations.


_empty_like = torch.empty_like


def _are_numbers(alpha_p: Tensor, alpha_n: Tensor) -> bool:
    return alpha_p.numel() == alpha_n.numel() == 1 and max(alpha_p.ndim, alpha_n.ndim) <= 8


_NUMBERS = (
    rules.cpu("alpha_p", "alpha_n")
    & rules.same_dtype("x", "alpha_p", "alpha_n")
    & rules.custom(_are_numbers, "alpha_p or alpha_n is not one number")
)

_xielu = native_op("xielu")

gelu_new = _unary(ops.gelu_new, ROWS, _empty_like)
gelu_fast = _unary(ops.gelu_fast, ROWS, _empty_like)
quick_gelu = _unary(ops.quick_gelu, ROWS, _empty_like)
relu2 = _unary(ops.relu2, ROWS, _empty_like)


@implements(ops.xielu, ROWS & _NUMBERS)
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """Return xIELU with the learned parameters *alpha_p* and *alpha_n*."""
    out = _empty_like(x)
    _xielu(out, x, alpha_p, alpha_n, beta, eps)
    return out
