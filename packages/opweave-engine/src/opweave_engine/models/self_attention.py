"""Self-attention of decoders: projections, norms of heads, rotation, attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave.layers import QKVParallelLinear, RowParallelLinear, get_rope
from opweave_engine.models.attention import Attention
from opweave_engine.models.rope_config import max_positions


class AttentionConfig(Protocol):
    """The common part of decoder configurations."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


class SelfAttention(nn.Module):
    """The attention of one layer, with this rank's heads.

    Args:
        config: the configuration.
        layer: the index of the layer, which identifies its cache.
        rope: ``rope_parameters``, as for :func:`~opweave.layers.get_rope`.
        dtype: dtype of weights and activations.
        qkv_bias, o_bias: which linear layers have a bias.
        norms: per-head norms of queries and keys, or None.
        window, scale, soft_cap: as in :class:`~opweave_engine.models.attention.Attention`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        layer: int,
        rope: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norms: tuple[nn.Module, nn.Module] | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=qkv_bias,
            params_dtype=dtype,
            return_bias=False,
        )
        self.q_norm: nn.Module | None
        self.k_norm: nn.Module | None
        self.q_norm, self.k_norm = (None, None) if norms is None else norms
        self.rotary_emb = get_rope(
            config.head_dim,
            config.max_position_embeddings,
            rope_parameters=rope,
            dtype=dtype,
            max_model_len=max_positions(rope, config.max_position_embeddings),
        )
        self.attention = Attention(
            layer,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            config.head_dim,
            window,
            scale,
            soft_cap,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=o_bias,
            params_dtype=dtype,
            return_bias=False,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = torch.unflatten(self.qkv_proj(hidden), -1, (-1, self.head_dim))
        query, key, value = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], -2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        # Query and key may be views of one tensor with value: a kernel that
        # rotates them in place leaves value's elements alone.
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attention(query, key, value))
        return output
