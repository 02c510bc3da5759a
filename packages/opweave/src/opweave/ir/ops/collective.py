"""Composites of a collective and the following op, for kernels that overlap the two."""

import torch
from torch import Tensor

from opweave.base import compat
from opweave.ir.ops.norm import fused_add_rms_norm
from opweave.ir.registry import register_op


@register_op(allow_inplace=True, composite=True)
def all_reduce_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group: str = "0",
) -> tuple[Tensor, Tensor]:
    """All-reduce, add a residual, then normalize.

    ``fused_add_rms_norm(all_reduce(x), x_residual, weight, epsilon)``. A composite: it rounds where
    the composition rounds. The collective decides the order in which ranks are summed.

    Args:
        x: ``(..., hidden)``, floating point: this rank's summand.
        x_residual: the shape and dtype of ``x``, the same on every rank.
        weight, epsilon: as in ``rms_norm``.
        group: torch's name of the process group; ``"0"`` is the default group of all ranks.

    Returns:
        The normalized sum and the sum, both with the shape and dtype of ``x``.

    Raises:
        RuntimeError: this process does not belong to a group of that name.
    """
    reduced = compat.all_reduce_sum(x, group)
    normalized: tuple[Tensor, Tensor] = fused_add_rms_norm(reduced, x_residual, weight, epsilon)
    return normalized


@all_reduce_rms_norm.register_input_generator
def _inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, float, str]:
    x, residual = torch.randn(2, num_tokens, hidden_size, device=device).to(dtype)
    return x, residual, torch.randn(hidden_size, device=device).to(dtype), 1e-6, "0"


# Kernels may round once less than native, and 1 ulp of float16 is large.
all_reduce_rms_norm.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
