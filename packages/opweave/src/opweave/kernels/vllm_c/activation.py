"""Activations, gated and not."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import IrOp, ops, rules
from opweave.ir.traits import BATCH_INVARIANT, ROUNDS_LESS
from opweave.kernels.arguments import FLOATS
from opweave.kernels.vllm_c import library

_INPUT = rules.cpu("x") & rules.dtype("x", *FLOATS) & rules.contiguous("x")
# A half of a row is made of whole vectors of 16 elements.
_GATED = _INPUT & rules.last_dim_multiple_of("x", 32)
_TRAITS = {BATCH_INVARIANT, ROUNDS_LESS}


@library.implements(ops.silu_and_mul, _GATED, traits=_TRAITS)
def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x1) * x2`` for the halves of the last dimension of *x*."""
    out = _half_of(x)
    library.ops().silu_and_mul(out, x)
    return out


@library.implements(
    ops.gelu_and_mul, _GATED & rules.one_of("approximate", "none", "tanh"), traits=_TRAITS
)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    out, ops = _half_of(x), library.ops()
    (ops.gelu_tanh_and_mul if approximate == "tanh" else ops.gelu_and_mul)(out, x)
    return out


def _pointwise(op: IrOp, name: str) -> None:
    @library.implements(op, _INPUT & rules.last_dim_multiple_of("x", 16), traits=_TRAITS)
    def implementation(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        getattr(library.ops(), name)(out, x)
        return out


_pointwise(ops.gelu_new, "gelu_new")
_pointwise(ops.gelu_fast, "gelu_fast")
_pointwise(ops.quick_gelu, "gelu_quick")


def _half_of(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
