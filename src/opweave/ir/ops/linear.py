"""The linear map."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op


@register_op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``(..., in_features)``.
        weight: ``(out_features, in_features)``, the dtype of ``x``.
        bias: ``(out_features,)`` or None.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.
    """
    return functional.linear(x, weight, bias)


@linear.register_input_generator
def _linear_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, hidden_size, device=device)
    weight = torch.randn(2 * hidden_size, hidden_size, device=device) / hidden_size**0.5
    bias = torch.randn(2 * hidden_size, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


# Sums of the same products in another order: the error grows with the number of terms.
linear.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
linear.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
linear.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
