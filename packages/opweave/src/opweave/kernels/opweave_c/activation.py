"""Gated activations."""

from __future__ import annotations

from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.call_paths import implements, native_op
from opweave.kernels.opweave_c.outputs import half_of

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
