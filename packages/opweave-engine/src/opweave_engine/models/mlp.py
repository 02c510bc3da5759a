"""The gated MLP of language models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.layers import MergedColumnParallelLinear, RowParallelLinear


class GatedMlp(nn.Module):
    """``down(activation([gate(x) | up(x)]))``.

    Args:
        hidden_size: the size of a token's hidden state.
        intermediate_size: the size between the two products, on all ranks.
        activation: a gated activation of ``[gate | up]``, such as ``SiluAndMul``.
        dtype: dtype of the weights.
        bias: whether the products have a bias.
        reduce_results: sum over the ranks; False: the caller does so.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: nn.Module,
        *,
        dtype: torch.dtype,
        bias: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=bias,
            params_dtype=dtype,
            return_bias=False,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            reduce_results=reduce_results,
            params_dtype=dtype,
            return_bias=False,
        )
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output
