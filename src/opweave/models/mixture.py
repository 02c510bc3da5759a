"""Language models of Llama's form with a mixture of experts in place of the MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.layers import (
    FusedMoE,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
    get_rope,
)
from opweave.models.attention import Attention
from opweave.models.causal_lm import CausalLM, Decoder
from opweave.models.mixture_config import MixtureConfig
from opweave.models.mlp import GatedMlp


class MixtureOfExperts(nn.Module):
    """Experts, and the linear map that routes to them."""

    def __init__(self, config: MixtureConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(
            config.hidden_size,
            config.num_experts,
            bias=False,
            params_dtype=dtype,
            return_bias=False,
        )
        self.experts = FusedMoE(
            config.num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            dtype,
            renormalize=config.norm_topk_prob,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.experts(hidden, self.gate(hidden))
        return mixed


class MixtureAttention(nn.Module):
    """Projections, norms of heads if the model has them, rotation, attention."""

    def __init__(self, config: MixtureConfig, layer: int, dtype: torch.dtype) -> None:
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
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) for _ in range(2)
            )
        self.rotary_emb = get_rope(
            config.head_dim,
            config.max_position_embeddings,
            rope_parameters=config.rope,
            dtype=dtype,
        )
        self.attention = Attention(layer, config.sliding_window)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            params_dtype=dtype,
            return_bias=False,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = torch.unflatten(self.qkv_proj(hidden), -1, (-1, self.head_dim))
        query, key, value = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], -2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attention(query, key, value))
        return output


class MixtureLayer(nn.Module):
    """Attention, and experts or an MLP, each after a norm."""

    def __init__(self, config: MixtureConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, epsilon, dtype=dtype)
        self.self_attn = MixtureAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(size, epsilon, dtype=dtype)
        self.mlp = (
            MixtureOfExperts(config, dtype)
            if config.sparse_layers[layer]
            else GatedMlp(size, config.intermediate_size, SiluAndMul(), dtype=dtype)
        )

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class MixtureForCausalLM(CausalLM):
    """A language model with a mixture of experts.

    Args:
        config: the model.
        dtype: of weights and activations.
    """

    def __init__(self, config: MixtureConfig, *, dtype: torch.dtype = torch.float32) -> None:
        size = config.hidden_size
        decoder = Decoder(
            VocabParallelEmbedding(config.vocab_size, size, params_dtype=dtype),
            (MixtureLayer(config, i, dtype) for i in range(len(config.sparse_layers))),
            RMSNorm(size, config.rms_norm_eps, dtype=dtype),
        )
        super().__init__(
            decoder, config.vocab_size, size, dtype=dtype, tied=config.tie_word_embeddings
        )
        self.config = config
