"""Language models of Llama's form with a mixture of experts in place of the MLP."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from opweave.layers import (
    FusedMoE,
    ReplicatedLinear,
    RMSNorm,
)
from opweave_engine.models.activations import expert_activation, gated_activation
from opweave_engine.models.decoder_layer import DecoderLayer
from opweave_engine.models.mixture_config import MixtureConfig
from opweave_engine.models.mlp import GatedMlp
from opweave_engine.models.pre_norm_lm import PreNormLM
from opweave_engine.models.self_attention import SelfAttention


class MixtureOfExperts(nn.Module):
    """Experts and their router, a linear layer."""

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
            activation=expert_activation(config.hidden_act),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.experts(hidden, self.gate(hidden))
        return mixed


class MixtureForCausalLM(PreNormLM):
    """A language model with a mixture of experts.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
    """

    def __init__(self, config: MixtureConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, lambda i: mixture_layer(config, i, dtype), dtype=dtype)
        self.config = config


def mixture_layer(config: MixtureConfig, layer: int, dtype: torch.dtype) -> DecoderLayer:
    """Build one block: attention, and experts or an MLP."""
    size, norm = config.hidden_size, partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
    attention = SelfAttention(
        config,
        layer,
        config.rope,
        dtype,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=(norm(config.head_dim), norm(config.head_dim)) if config.qk_norm else None,
        window=config.sliding_window,
    )
    mlp = (
        MixtureOfExperts(config, dtype)
        if config.sparse_layers[layer]
        else GatedMlp(
            size, config.intermediate_size, gated_activation(config.hidden_act), dtype=dtype
        )
    )
    return DecoderLayer(norm(size), attention, norm(size), mlp)
