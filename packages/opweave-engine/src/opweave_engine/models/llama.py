"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, which differ in flags of :class:`LlamaConfig`.

Modules are named as in checkpoints, except the merged ``qkv_proj`` and ``gate_up_proj``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch

from opweave.layers import RMSNorm
from opweave_engine.models.blocks import DecoderLayer, GatedMlp, SelfAttention
from opweave_engine.models.causal_lm import PreNormLM
from opweave_engine.models.config import LlamaConfig, gated_activation


class LlamaForCausalLM(PreNormLM):
    """A language model of the Llama family.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
    """

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, lambda i: llama_layer(config, i, dtype), dtype=dtype)
        self.config = config

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(LlamaConfig.from_hf(config), dtype=dtype)


def llama_layer(config: LlamaConfig, layer: int, dtype: torch.dtype) -> DecoderLayer:
    """Build one block."""
    size, norm = config.hidden_size, partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
    attention = SelfAttention(
        config,
        layer,
        config.rope,
        dtype,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        norms=(norm(config.head_dim), norm(config.head_dim)) if config.qk_norm else None,
        window=config.windows[layer],
    )
    activation = gated_activation(config.hidden_act)
    mlp = GatedMlp(size, config.intermediate_size, activation, bias=config.mlp_bias, dtype=dtype)
    return DecoderLayer(norm(size), attention, norm(size), mlp)
