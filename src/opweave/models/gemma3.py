"""Gemma 3's language model: windows and two ropes by layer type (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from opweave.layers import (
    GeluAndMul,
    GemmaRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_rope,
)
from opweave.models.attention import Attention
from opweave.models.causal_lm import CausalLM, Decoder
from opweave.models.gemma3_config import Gemma3Config
from opweave.models.mlp import GatedMlp


class Gemma3Attention(nn.Module):
    """Projections, norms of heads, rotation, attention."""

    def __init__(self, config: Gemma3Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            params_dtype=dtype,
            return_bias=False,
        )
        self.q_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotary_emb = get_rope(
            config.head_dim,
            config.max_position_embeddings,
            rope_parameters=config.ropes[config.layer_types[layer]],
            dtype=dtype,
        )
        self.attention = Attention(
            layer,
            config.window(layer),
            config.query_pre_attn_scalar**-0.5,
            config.attn_logit_softcapping,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            params_dtype=dtype,
            return_bias=False,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value = qkv.split_with_sizes([heads, kv_heads, kv_heads], -2)
        query, key = self.rotary_emb(positions, self.q_norm(query), self.k_norm(key))
        output: Tensor = self.o_proj(self.attention(query, key, value))
        return output


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: Gemma3Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaRMSNorm(size, epsilon)
        self.self_attn = Gemma3Attention(config, layer, dtype)
        self.post_attention_layernorm = GemmaRMSNorm(size, epsilon)
        self.pre_feedforward_layernorm = GemmaRMSNorm(size, epsilon)
        self.mlp = GatedMlp(size, config.intermediate_size, GeluAndMul("tanh"), dtype=dtype)
        self.post_feedforward_layernorm = GemmaRMSNorm(size, epsilon)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(positions, hidden))
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3ForCausalLM(CausalLM):
    """A Gemma 3 language model, without the vision encoder.

    Args:
        config: the model.
        dtype: of weights and activations; norms have their weights in float32.
    """

    def __init__(self, config: Gemma3Config, *, dtype: torch.dtype = torch.float32) -> None:
        size = config.hidden_size
        decoder = Decoder(
            VocabParallelEmbedding(config.vocab_size, size, params_dtype=dtype),
            (Gemma3Layer(config, i, dtype) for i in range(config.num_hidden_layers)),
            GemmaRMSNorm(size, config.rms_norm_eps),
            # Rounded as a weight is.
            torch.tensor(size**0.5, dtype=dtype, device="cpu").item(),
        )
        super().__init__(
            decoder,
            config.vocab_size,
            size,
            dtype=dtype,
            tied=config.tie_word_embeddings,
            soft_cap=config.final_logit_softcapping,
        )
        self.config = config

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(Gemma3Config.from_hf(config), dtype=dtype)
