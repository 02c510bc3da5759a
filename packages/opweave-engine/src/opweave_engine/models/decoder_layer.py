"""The block of a decoder, which takes and returns a hidden state and a residual.

*hidden* is the previous block's output, and *residual* the sum of all outputs before it. Each norm
first adds them, so that a kernel can do both in one pass over memory.
"""

from __future__ import annotations

from torch import Tensor, nn


def add_and_norm(norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm of ``hidden + residual``, and the sum. Both inputs may be donated.

    Args:
        norm: takes one tensor; or takes two, and returns the norm and the sum.
        hidden, residual: ``(T, hidden_size)``; *residual* is None before the first block.
    """
    if residual is None:
        return norm(hidden), hidden
    both: tuple[Tensor, Tensor] = norm(hidden, residual)
    return both


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm.

    Args:
        input_layernorm: before the attention.
        self_attn: takes positions and hidden states.
        post_attention_layernorm: before the MLP.
        mlp: takes hidden states.
    """

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: nn.Module,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = add_and_norm(self.input_layernorm, hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = add_and_norm(self.post_attention_layernorm, hidden, residual)
        return self.mlp(hidden), residual
