"""RMS norms."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.traits import BATCH_INVARIANT, ROUNDS_LESS
from opweave.kernels.arguments import FLOATS
from opweave.kernels.vllm_c import library

# The kernels compute in float32 and round once, multiply whole vectors of 8 or 16 elements, and
# read rows one after the other.
_ROWS = (
    rules.cpu("x")
    & rules.dtype("x", *FLOATS)
    & rules.same_dtype("x", "weight")
    & rules.contiguous("x", "weight")
    & rules.not_none("weight")
    & rules.last_dim_multiple_of("x", 16)
    & rules.per_last_dim("weight", "x")
    & rules.is_none("variance_size")
)
_TRAITS = {BATCH_INVARIANT, ROUNDS_LESS}


@library.implements(ops.rms_norm, _ROWS, traits=_TRAITS)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Return the norm of each row, times *weight*."""
    out = torch.empty_like(x)
    library.ops().rms_norm(out, x, weight, epsilon)
    return out


@library.implements(
    ops.fused_add_rms_norm,
    _ROWS
    & rules.contiguous("x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.same_dtype("x", "x_residual"),
    traits=_TRAITS,
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum; the kernel writes both over its inputs."""
    normed, residual = x.clone(), x_residual.clone()
    library.ops().fused_add_rms_norm(normed, residual, weight, epsilon)
    return normed, residual
