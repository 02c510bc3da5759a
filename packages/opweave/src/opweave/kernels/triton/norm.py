"""RMS norms, optionally fused with the quantization of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave import ir
from opweave.ir import rules
from opweave.kernels.triton.arguments import on_device, row_count, row_stride, rows
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.registration import block_of, implements

_kernels = Kernels("norm")

WEIGHT = on_device("weight") & rules.per_last_dim("weight", "x") & rules.contiguous("weight")
NORM = rows("x") & WEIGHT & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
ADD = (
    NORM
    & rows("x_residual")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
)


def normalize(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    scheme: str | None = None,
    scales: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Normalize the rows of *x* into *out*.

    With *residual*, write ``x + residual`` to *total*, and normalize the sum.

    Args:
        out: has the shape of *x*, and its dtype or that of the quantized codes.
        scheme, scales, scale: see ``store_quantized``.
    """
    width = x.shape[-1]
    strides = [0 if t is None else row_stride(t) for t in (out, total, x, residual)]
    launch(
        _kernels.rms_norm,
        (row_count(x),),
        out,
        scales,
        total,
        x,
        residual,
        weight,
        scale,
        *strides,
        width,
        epsilon,
        SCHEME=scheme,
        BLOCK=block_of(width),
        num_warps=warps_for(width),
    )


def warps_for(width: int) -> int:
    """Return the number of warps per row: 8 to 16 elements per lane, at most 1,024 lanes.

    >>> [warps_for(width) for width in (64, 1024, 4096, 65536)]
    [1, 2, 8, 32]
    """
    return min(max(block_of(width) // 512, 1), 32)


@implements(ir.ops.rms_norm, NORM & rules.is_none("variance_size"))
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Normalize the rows of *x*, ``(..., h)``, into a new tensor."""
    out = torch.empty_like(x)
    normalize(out, x, weight, epsilon)
    return out


@implements(ir.ops.fused_add_rms_norm, ADD & rules.is_none("variance_size"))
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add *x* and *x_residual*, both ``(..., h)``, and normalize the sum, in one pass."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    normalize(out, x, weight, epsilon, residual=x_residual, total=total)
    return out, total
