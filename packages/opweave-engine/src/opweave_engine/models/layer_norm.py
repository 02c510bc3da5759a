"""Layer normalization with weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave import ir


class LayerNorm(nn.Module):
    """``ir.ops.layer_norm`` over the last dimension, with weight and bias.

    Args:
        size: the size of the last dimension.
        epsilon: added to the variance.
        dtype: dtype of weight and bias.
    """

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = ir.ops.layer_norm(x, self.weight, self.bias, self.epsilon)
        return normed
