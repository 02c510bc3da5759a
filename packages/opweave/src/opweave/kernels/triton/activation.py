"""Gated activations."""

from __future__ import annotations

from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.triton.arguments import row_count, row_stride, rows
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.outputs import half_of
from opweave.kernels.triton.registration import implements

_kernels = Kernels("activation")

GATED = rows("x") & rules.last_dim_multiple_of("x", 2)
_BLOCK = 1024


@implements(ops.silu_and_mul, GATED)
def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x1) * x2`` for the halves of the last dimension of *x*."""
    return _act_and_mul(x, "silu")


@implements(ops.mul_and_silu, GATED)
def mul_and_silu(x: Tensor) -> Tensor:
    """Return ``x1 * silu(x2)`` for the halves of the last dimension of *x*."""
    return _act_and_mul(x, "silu", second=True)


@implements(ops.gelu_and_mul, GATED & rules.one_of("approximate", "none", "tanh"))
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    return _act_and_mul(x, "gelu" if approximate == "none" else "gelu_tanh")


def _act_and_mul(x: Tensor, kind: str, *, second: bool = False) -> Tensor:
    out = half_of(x)
    width = out.shape[-1]
    grid = (row_count(x), -(-width // _BLOCK))
    constants = {"KIND": kind, "SECOND": second, "BLOCK": _BLOCK}
    launch(_kernels.act_and_mul, grid, out, x, row_stride(x), width, **constants)
    return out
