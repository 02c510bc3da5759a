"""Ops that only acme declares. Each has its priority on the command line, as any op has:
``--ir-op-priority.acme_tiled_linear=native``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave import ir

TILE = 16  # outputs that the device computes side by side


@ir.register_op
def acme_tiled_linear(
    x: Tensor, tiles: Tensor, out_features: int, bias: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias``, with the weight laid out by :func:`tile`.

    Args:
        x: ``(..., in_features)``.
        tiles: ``(ceil(out_features / TILE), in_features, TILE)``, the dtype of ``x``.
        out_features: the rows of the weight; what the last tile has beyond them is not used.
        bias: ``(out_features,)`` or None.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.
    """
    weight = tiles.transpose(1, 2).reshape(-1, tiles.shape[1])[:out_features]
    return functional.linear(x, weight, bias)


@ir.register_op
def acme_scaled_residual(x: Tensor, residual: Tensor, scale: float) -> Tensor:
    """``residual + x * scale``; the product is rounded to the dtype of ``x`` before the sum.

    Args:
        x: any shape, floating point.
        residual: the shape and dtype of ``x``.
        scale: factor on ``x``.

    Returns:
        Shape and dtype of ``x``.
    """
    return residual + x * scale


def tile(weight: Tensor) -> Tensor:
    """Return *weight*, ``(out_features, in_features)``, in tiles, padded with zeros."""
    padding = -weight.shape[0] % TILE
    padded = functional.pad(weight, (0, 0, 0, padding))
    return padded.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


@acme_tiled_linear.register_input_generator
def _tiled_linear_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, int, Tensor]:
    x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    weight = torch.randn(hidden_size + 3, hidden_size, device=device) / hidden_size**0.5
    bias = torch.randn(hidden_size + 3, device=device).to(dtype)
    return x, tile(weight.to(dtype)), hidden_size + 3, bias


@acme_scaled_residual.register_input_generator
def _scaled_residual_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, float]:
    x, residual = torch.randn(2, num_tokens, hidden_size, device=device).to(dtype)
    return x, residual, 0.22


# Sums of the same products in another order, as for ir.ops.linear.
acme_tiled_linear.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
acme_tiled_linear.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
acme_tiled_linear.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
