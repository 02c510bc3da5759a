"""Activations, gated and pointwise."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.opweave_c.calls import ROWS, half_of, implements, native_op

# Gated activations.


_GATED = ROWS & rules.last_dim_multiple_of("x", 2)
_KNOWN = rules.one_of("approximate", "none", "tanh")

_silu_and_mul = native_op("silu_and_mul")
_mul_and_silu = native_op("mul_and_silu")
_gelu_and_mul = native_op("gelu_and_mul")
_gelu_and_mul_sparse = native_op("gelu_and_mul_sparse")
_fatrelu_and_mul = native_op("fatrelu_and_mul")
_swigluoai_and_mul = native_op("swigluoai_and_mul")


@implements(ops.silu_and_mul, _GATED)
def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x1) * x2`` for the halves of the last dimension of *x*."""
    out = half_of(x)
    _silu_and_mul(out, x)
    return out


@implements(ops.mul_and_silu, _GATED)
def mul_and_silu(x: Tensor) -> Tensor:
    """Return ``x1 * silu(x2)`` for the halves of the last dimension of *x*."""
    out = half_of(x)
    _mul_and_silu(out, x)
    return out


@implements(ops.gelu_and_mul, _GATED & _KNOWN)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    out = half_of(x)
    _gelu_and_mul(out, x, approximate == "tanh")
    return out


@implements(ops.gelu_and_mul_sparse, _GATED & _KNOWN)
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

_gelu_new = native_op("gelu_new")
_gelu_fast = native_op("gelu_fast")
_quick_gelu = native_op("quick_gelu")
_relu2 = native_op("relu2")
_xielu = native_op("xielu")


@implements(ops.gelu_new, ROWS)
def gelu_new(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    out = _empty_like(x)
    _gelu_new(out, x)
    return out


@implements(ops.gelu_fast, ROWS)
def gelu_fast(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, in factored form."""
    out = _empty_like(x)
    _gelu_fast(out, x)
    return out


@implements(ops.quick_gelu, ROWS)
def quick_gelu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(1.702 * x)``."""
    out = _empty_like(x)
    _quick_gelu(out, x)
    return out


@implements(ops.relu2, ROWS)
def relu2(x: Tensor) -> Tensor:
    """Return ``relu(x) ** 2``."""
    out = _empty_like(x)
    _relu2(out, x)
    return out


@implements(ops.xielu, ROWS & _NUMBERS)
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """Return xIELU with the learned parameters *alpha_p* and *alpha_n*."""
    out = _empty_like(x)
    _xielu(out, x, alpha_p, alpha_n, beta, eps)
    return out
