"""Pointwise activations."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.call_paths import implements, native_op

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
