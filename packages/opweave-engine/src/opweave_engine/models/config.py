"""The configuration of the Llama family, read from a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opweave_engine.models.activations import read_activation
from opweave_engine.models.errors import InvalidConfigError
from opweave_engine.models.fields import Fields
from opweave_engine.models.heads import read_heads
from opweave_engine.models.rope_config import max_positions, rope_parameters

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
# Defaults of transformers by architecture: positions, vocabulary and MLP size.
_ABSENT = dict(
    zip(
        SUPPORTED_ARCHITECTURES,
        (
            (2048, 32000, 11008),
            (131072, 32000, 14336),
            (32768, 151936, 22016),
            (32768, 151936, 22016),
        ),
        strict=True,
    )
)
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a model of the Llama family: Llama, Mistral, Qwen2 or Qwen3.

    Sizes are named as in ``config.json``. Differences between architectures are explicit fields.

    Attributes:
        architecture: one of ``SUPPORTED_ARCHITECTURES``.
        rope: ``rope_parameters``, including ``rope_theta``.
        windows: the size of each layer's sliding window, or None.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether queries and keys are normalized, head by head.
        hidden_act: the activation of the MLPs.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    dtype: str | None = None

    @property
    def max_positions(self) -> int:
        """The number of positions that the rope supports."""
        return max_positions(self.rope, self.max_position_embeddings)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers for that architecture.

        Raises:
            UnsupportedModelError: the architecture, activation, rope type or quantization is not
                supported; the message lists the supported ones.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        architecture = _architecture(fields)
        fields.refuse_quantized()
        layers = fields.size("num_hidden_layers", 32)
        context, vocabulary, intermediate = _ABSENT[architecture]
        positions = fields.count("max_position_embeddings", context)
        biased = fields.flag("attention_bias", False) and architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
        )
        return cls(
            architecture=architecture,
            vocab_size=fields.size("vocab_size", vocabulary),
            hidden_size=fields.size("hidden_size", 4096),
            intermediate_size=fields.size("intermediate_size", intermediate),
            num_hidden_layers=layers,
            **_heads(fields, architecture),
            max_position_embeddings=positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope_parameters(fields, positions),
            windows=_windows(fields, architecture, layers),
            qkv_bias=biased or architecture == "Qwen2ForCausalLM",
            o_bias=biased,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            hidden_act=read_activation(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            dtype=fields.dtype(),
        )


def _architecture(fields: Fields) -> str:
    named = fields.texts("architectures")
    if len(named) != 1:
        raise InvalidConfigError(
            f"{fields.name} has 'architectures': {named}; it must name one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    return fields.require("architectures", named[0], *SUPPORTED_ARCHITECTURES)


def _heads(fields: Fields, architecture: str) -> dict[str, int]:
    # transformers has these defaults for absent keys.
    kv_heads = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
    head_dim = 128 if architecture == "Qwen3ForCausalLM" else None
    return read_heads(fields, kv_heads=kv_heads.get(architecture), head_dim=head_dim)


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    everywhere: tuple[None, ...] = (None,) * layers
    if architecture == "LlamaForCausalLM":
        return everywhere
    absent = "sliding_window" not in fields.values
    window = (
        4096 if absent else (fields.count("sliding_window") if "sliding_window" in fields else None)
    )
    types = fields.texts("layer_types")  # Ministral's are in configurations of Mistral
    if architecture == "MistralForCausalLM" and not types:
        return (window,) * layers
    uses = architecture == "MistralForCausalLM" or fields.flag("use_sliding_window", False)
    if not uses or window is None:
        return everywhere
    if not types:
        full = fields.values.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int) or full < 0:
            raise InvalidConfigError(
                f"{fields.name} has 'max_window_layers': {full!r}; it must be an integer from 0."
            )
        return tuple(window if layer >= full else None for layer in range(layers))
    if len(types) != layers:
        raise InvalidConfigError(
            f"{fields.name} has {len(types)} 'layer_types' for {layers} layers."
        )
    return tuple(
        window if fields.require("layer_types", kind, *_LAYER_TYPES) == _LAYER_TYPES[1] else None
        for kind in types
    )
