"""Layer normalization."""

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.spelling import ROWWISE_ELEMENTS
from opweave.ir.traits import ROWWISE


@register_op(native_traits={ROWWISE})
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`` over the last dimension.

    Computed in float32 (float64 stays), rounded once, with the population variance.

    Args:
        x: ``(..., hidden)``, floating point.
        weight, bias: ``(hidden,)``, any floating dtype; None for 1 and 0.
        epsilon: added to the variance.

    Returns:
        Shape and dtype of ``x``, contiguous.

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = None if weight is None else weight.to(y.dtype)
    shift = None if bias is None else bias.to(y.dtype)
    return functional.layer_norm(y, y.shape[-1:], factor, shift, epsilon).to(x.dtype)


@layer_norm.register_input_generator
def _inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, float]:
    x = 1 + torch.randn(num_tokens, hidden_size, device=device)
    weight, bias = torch.randn(2, hidden_size, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype), 1e-5


@layer_norm.register_spelling(marker="var_mean", elements=ROWWISE_ELEMENTS)
def _torch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


layer_norm.register_spelling(marker="var_mean", elements=ROWWISE_ELEMENTS)(layer_norm.native)
