"""The configuration of BERT, read from a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opweave_engine.models.activations import read_activation
from opweave_engine.models.fields import Fields


@dataclass(frozen=True)
class BertConfig:
    """The configuration of a BERT encoder. Sizes are named as in ``config.json``.

    Attributes:
        hidden_act: the activation of the MLPs.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    dtype: str | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation, a kind of positions or a quantization that is not
                supported, or a decoder.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        for key, default in (("is_decoder", False), ("add_cross_attention", False)):
            fields.require(key, fields.flag(key, default), default)
        kind = fields.text("position_embedding_type", "absolute")
        fields.require("position_embedding_type", kind, "absolute")
        fields.refuse_quantized()
        hidden, heads = fields.count("hidden_size", 768), fields.count("num_attention_heads", 12)
        fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)
        return cls(
            vocab_size=fields.count("vocab_size", 30522),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size", 3072),
            num_hidden_layers=fields.count("num_hidden_layers", 12),
            num_attention_heads=heads,
            max_position_embeddings=fields.count("max_position_embeddings", 512),
            type_vocab_size=fields.count("type_vocab_size", 2),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            hidden_act=read_activation(fields, default="gelu"),
            dtype=fields.dtype(),
        )
