"""The configuration of Gemma 3's language model, read from a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opweave_engine.models.activations import read_activation
from opweave_engine.models.errors import InvalidConfigError
from opweave_engine.models.fields import Fields
from opweave_engine.models.rope_config import max_positions, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}


@dataclass(frozen=True)
class Gemma3Config:
    """The configuration of a Gemma 3 text model. Sizes are named as in ``config.json``.

    Attributes:
        layer_types: ``"full_attention"`` or ``"sliding_attention"``, for each layer.
        sliding_window: the window size of layers with sliding attention.
        ropes: the ``rope_parameters`` of each layer type, including ``rope_theta``.
        query_pre_attn_scalar: scores are divided by its square root.
        attn_logit_softcapping, final_logit_softcapping: caps of scores and logits; None: none.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_activation: str
    query_pre_attn_scalar: float
    layer_types: tuple[str, ...]
    sliding_window: int
    ropes: Mapping[str, Mapping[str, Any]]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    attention_bias: bool
    tie_word_embeddings: bool
    dtype: str | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation, rope, layer type or quantization that is not
                supported, or attention to later tokens.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        fields.refuse_quantized()
        backward = fields.flag("use_bidirectional_attention", False)
        fields.require("use_bidirectional_attention", backward, False)
        heads, kv_heads = (
            fields.size("num_attention_heads", 8),
            fields.size("num_key_value_heads", 4),
        )
        fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
        positions = fields.count("max_position_embeddings", 131_072)
        return cls(
            vocab_size=fields.size("vocab_size", 262208),
            hidden_size=fields.size("hidden_size", 2304),
            intermediate_size=fields.size("intermediate_size", 9216),
            num_hidden_layers=fields.size("num_hidden_layers", 26),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=fields.count("head_dim", 256),
            max_position_embeddings=positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            hidden_activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            query_pre_attn_scalar=fields.number("query_pre_attn_scalar", 256),
            layer_types=_layer_types(fields),
            sliding_window=fields.size("sliding_window", 4096),
            ropes={kind: _rope(fields, kind, positions) for kind in _THETA},
            attn_logit_softcapping=_cap(fields, "attn_logit_softcapping"),
            final_logit_softcapping=_cap(fields, "final_logit_softcapping"),
            attention_bias=fields.flag("attention_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", True),
            dtype=fields.dtype(),
        )

    @property
    def max_positions(self) -> int:
        """The number of positions that the ropes of all layers support."""
        longest = (
            max_positions(rope, self.max_position_embeddings) for rope in self.ropes.values()
        )
        return min(longest)

    def window(self, layer: int) -> int | None:
        """Return the window size of *layer*, or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def _cap(fields: Fields, key: str) -> float | None:
    return fields.number(key) if key in fields else None


def _layer_types(fields: Fields) -> tuple[str, ...]:
    layers, types = fields.size("num_hidden_layers", 26), fields.texts("layer_types")
    if not types:
        pattern = fields.count("sliding_window_pattern", 6)
        return tuple(FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers))
    if len(types) != layers:
        raise InvalidConfigError(
            f"{fields.name} has {len(types)} 'layer_types' for {layers} layers."
        )
    return tuple(fields.require("layer_types", kind, *_THETA) for kind in types)


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
