"""Gemma 3's language model: windows and two ropes by layer type (arXiv:2503.19786)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from opweave.layers import GemmaRMSNorm
from opweave_engine.models.blocks import GatedMlp, ResidualStream, SelfAttention, add_and_norm
from opweave_engine.models.causal_lm import PreNormLM
from opweave_engine.models.config import (
    FULL,
    SLIDING,
    AttentionConfig,
    Fields,
    InvalidConfigError,
    check_layer_types,
    gated_activation,
    key,
    max_positions,
    read_activation,
    read_rope,
)

# The configuration of Gemma 3's language model, read from a checkpoint's ``config.json``.


_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")  # of tensors that are not loaded


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(AttentionConfig):
    """The configuration of a Gemma 3 text model. Sizes are named as in ``config.json``.

    Attributes:
        layer_types: ``"full_attention"`` or ``"sliding_attention"``, for each layer.
        sliding_window: the window size of layers with sliding attention.
        rope: the ``rope_parameters`` of layers with full attention.
        ropes: the ``rope_parameters`` of each layer type, including ``rope_theta``.
        query_pre_attn_scalar: scores are divided by its square root.
        attn_logit_softcapping, final_logit_softcapping: caps of scores and logits; None: none.
    """

    vocab_size: int = key(Fields.size, 262208)
    hidden_size: int = key(Fields.size, 2304)
    intermediate_size: int = key(Fields.size, 9216)
    num_hidden_layers: int = key(Fields.size, 26)
    num_attention_heads: int = key(Fields.size, 8)
    num_key_value_heads: int = key(Fields.size, 4)
    head_dim: int = key(Fields.count, 256)
    max_position_embeddings: int = key(Fields.count, 131_072)
    hidden_activation: str = key(read_activation, "gelu_pytorch_tanh")
    query_pre_attn_scalar: float = key(Fields.number, 256)
    layer_types: tuple[str, ...]
    sliding_window: int = key(Fields.size, 4096)
    ropes: Mapping[str, Mapping[str, Any]]
    attn_logit_softcapping: float | None = key(Fields.optional_number)
    final_logit_softcapping: float | None = key(Fields.optional_number)
    attention_bias: bool = key(Fields.flag, False)
    tie_word_embeddings: bool = key(Fields.flag, True)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        backward = fields.flag("use_bidirectional_attention", False)
        fields.require("use_bidirectional_attention", backward, False)
        positions = fields.count("max_position_embeddings", 131_072)
        ropes = {kind: _rope(fields, kind, positions) for kind in _THETA}
        config = cls.read(fields, layer_types=_layer_types(fields), rope=ropes[FULL], ropes=ropes)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
        return config

    @property
    def max_positions(self) -> int:
        """The number of positions that the ropes of all layers support."""
        length = self.max_position_embeddings
        return min(max_positions(rope, length) for rope in self.ropes.values())

    def window(self, layer: int) -> int | None:
        """Return the window size of *layer*, or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def _layer_types(fields: Fields) -> tuple[str, ...]:
    layers, types = fields.size("num_hidden_layers", 26), fields.texts("layer_types")
    if not types:
        pattern = fields.count("sliding_window_pattern", 6)
        return tuple(FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers))
    check_layer_types(fields, types, layers)
    return tuple(types)


def _rope(fields: Fields, kind: str, positions: int) -> dict[str, Any]:
    """Return the parameters of one layer type, from ``rope_parameters`` and the older keys.

    As in transformers, the base in ``rope_parameters`` wins over the older keys, and
    ``rope_scaling`` wins over the rest of it.
    """
    rope = fields.nested("rope_parameters").nested(kind)
    older = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}[kind]
    # The older format scales the layers that see everything, and no others.
    if kind == FULL and "rope_scaling" in fields:
        scaling = fields.nested("rope_scaling")
        _require_one_meaning(rope, scaling)
        rope = Fields({**rope.values, **scaling.values}, scaling.name)
    return read_rope(rope, fields.number(older, _THETA[kind]), positions, outer=fields)


def _require_one_meaning(rope: Fields, scaling: Fields) -> None:
    """Raise InvalidConfigError where versions of transformers disagree on what *scaling* means."""
    kind = scaling.text("type", "default")
    if "rope_type" not in scaling and kind != rope.text("rope_type", "default"):
        raise InvalidConfigError(
            f"{scaling.name} has 'type': {kind!r} and no 'rope_type': transformers 4 scales the "
            f"rope of Gemma 3 by it, transformers 5 does not. Write 'rope_type': {kind!r} to "
            "scale, or remove 'rope_scaling'."
        )


# The model.


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: Gemma3Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, norm = config.hidden_size, partial(GemmaRMSNorm, eps=config.rms_norm_eps)
        self.input_layernorm = norm(size)
        self.self_attn = SelfAttention(
            config,
            layer,
            config.ropes[config.layer_types[layer]],
            dtype,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            norms=(norm(config.head_dim), norm(config.head_dim)),
            window=config.window(layer),
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
        )
        self.post_attention_layernorm = norm(size)
        self.pre_feedforward_layernorm = norm(size)
        activation = gated_activation(config.hidden_activation)
        self.mlp = GatedMlp(size, config.intermediate_size, activation, dtype=dtype)
        self.post_feedforward_layernorm = norm(size)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> ResidualStream:
        hidden, residual = add_and_norm(self.input_layernorm, hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(positions, hidden))
        hidden, residual = add_and_norm(self.pre_feedforward_layernorm, hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3ForCausalLM(PreNormLM[Gemma3Config]):
    """A Gemma 3 language model, without the vision encoder.

    Args:
        config: the model.
        dtype: of weights and activations; norms have their weights in float32.
    """

    config_class = Gemma3Config

    def __init__(self, config: Gemma3Config, *, dtype: torch.dtype = torch.float32) -> None:
        norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        # The factor is rounded to the dtype, as a weight is.
        scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        soft_cap = config.final_logit_softcapping
        super().__init__(config, dtype=dtype, norm=norm, embed_scale=scale, soft_cap=soft_cap)

    @classmethod
    def layer(cls, config: Gemma3Config, layer: int, dtype: torch.dtype) -> nn.Module:
        return Gemma3Layer(config, layer, dtype)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a Gemma 3 that also sees images, whose vision encoder is left out."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        fields = Fields(config)
        fields.refuse_quantized()
        text = dict(fields.nested("text_config").values)
        tied = "tie_word_embeddings"
        text[tied] = fields.flag(tied, Fields(text, "text_config").flag(tied, True))
        return super().from_hf(text, dtype=dtype)

    def own_name(self, name: str) -> str:
        """Return what checkpoints of the language model alone call a tensor.

        transformers 5 writes ``model.language_model.layers`` and ``model.vision_tower``, earlier
        versions ``language_model.model.layers`` and ``vision_tower``.
        """
        if name.startswith("language_model."):
            return name.removeprefix("language_model.")
        inner = name.removeprefix("model.")
        if inner.startswith("language_model."):
            return f"model.{inner.removeprefix('language_model.')}"
        return inner if inner.startswith(_VISION_PREFIXES) else name

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = ((self.own_name(name), tensor) for name, tensor in tensors)
        super().load_weights((n, t) for n, t in named if not n.startswith(_VISION_PREFIXES))
