"""Gemma 3's language model: windows and two ropes by layer type (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from opweave.layers import GemmaRMSNorm, VocabParallelEmbedding
from opweave_engine.models.activations import gated_activation
from opweave_engine.models.causal_lm import CausalLM, Decoder
from opweave_engine.models.decoder_layer import add_and_norm
from opweave_engine.models.fields import Fields
from opweave_engine.models.gemma3_config import Gemma3Config
from opweave_engine.models.mlp import GatedMlp
from opweave_engine.models.self_attention import SelfAttention


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: Gemma3Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaRMSNorm(size, epsilon)
        self.self_attn = SelfAttention(
            config,
            layer,
            config.ropes[config.layer_types[layer]],
            dtype,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            norms=(
                GemmaRMSNorm(config.head_dim, epsilon),
                GemmaRMSNorm(config.head_dim, epsilon),
            ),
            window=config.window(layer),
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
        )
        self.post_attention_layernorm = GemmaRMSNorm(size, epsilon)
        self.pre_feedforward_layernorm = GemmaRMSNorm(size, epsilon)
        activation = gated_activation(config.hidden_activation)
        self.mlp = GatedMlp(size, config.intermediate_size, activation, dtype=dtype)
        self.post_feedforward_layernorm = GemmaRMSNorm(size, epsilon)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = add_and_norm(self.input_layernorm, hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(positions, hidden))
        hidden, residual = add_and_norm(self.pre_feedforward_layernorm, hidden, residual)
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
            max_positions=config.max_positions,
            soft_cap=config.final_logit_softcapping,
        )
        self.config = config

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(Gemma3Config.from_hf(config), dtype=dtype)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a Gemma 3 that also sees images, whose vision encoder is left out."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        fields = Fields(config)
        fields.refuse_quantized()
        text = dict(fields.nested("text_config").values)
        tied = "tie_word_embeddings"
        text[tied] = fields.flag(tied, Fields(text, "text_config").flag(tied, True))
        return cls(Gemma3Config.from_hf(text), dtype=dtype)

    def own_name(self, name: str) -> str:
        return _text_name(name)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = ((self.own_name(name), tensor) for name, tensor in tensors)
        super().load_weights((n, t) for n, t in named if not n.startswith(_OF_IMAGES))


_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")


def _text_name(name: str) -> str:
    """Return what checkpoints of the language model alone call a tensor.

    transformers 5 writes ``model.language_model.layers`` and ``model.vision_tower``, earlier
    versions ``language_model.model.layers`` and ``vision_tower``.
    """
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    inner = name.removeprefix("model.")
    if inner.startswith("language_model."):
        return f"model.{inner.removeprefix('language_model.')}"
    return inner if inner.startswith(_OF_IMAGES) else name
