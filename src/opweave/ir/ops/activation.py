"""Gated activations: one half of the last dimension is activated, and multiplies the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op


@register_op
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(x1) * x2`` for the halves ``x1, x2`` of the last dimension.

    Args:
        x: ``(..., 2 * d)``, floating point.

    Returns:
        ``(..., d)`` in the dtype of ``x``; the activation is rounded to it before the product.

    Raises:
        ValueError: the last dimension is odd.

    Source: SwiGLU without its matrices, Shazeer, arXiv:2002.05202.
    """
    first, second = _halves(x, "silu_and_mul")
    return functional.silu(first) * second


@register_op
def mul_and_silu(x: Tensor) -> Tensor:
    """``x1 * silu(x2)`` for the halves ``x1, x2`` of the last dimension.

    As :func:`silu_and_mul`, with the roles of the halves exchanged.
    """
    first, second = _halves(x, "mul_and_silu")
    return first * functional.silu(second)


@register_op
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(x1) * x2`` for the halves ``x1, x2`` of the last dimension.

    Args:
        x: ``(..., 2 * d)``, floating point.
        approximate: ``"none"`` for the exact ``x * Phi(x)``, ``"tanh"`` for the approximation by
            tanh.

    Returns:
        ``(..., d)`` in the dtype of ``x``.

    Raises:
        ValueError: the last dimension is odd, or ``approximate`` is something else.

    Source: GEGLU without its matrices, Shazeer, arXiv:2002.05202.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu_and_mul: approximate={approximate!r} is neither 'none' nor 'tanh'.")
    first, second = _halves(x, "gelu_and_mul")
    return functional.gelu(first, approximate=approximate) * second


def _halves(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{name}: the last dimension of x must be even, to be split in halves; x has shape "
            f"{tuple(x.shape)}."
        )
    width = x.shape[-1] // 2
    return x[..., :width], x[..., width:]


def _random(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    return torch.randn(num_tokens, 2 * hidden_size, device=device).to(dtype)


@gelu_and_mul.register_input_generator
def _gelu_and_mul_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, str]:
    return _random(num_tokens, hidden_size, dtype, device), "none"


@silu_and_mul.register_input_generator
@mul_and_silu.register_input_generator
def _gated_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor]:
    return (_random(num_tokens, hidden_size, dtype, device),)
