"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, which differ in flags of :class:`LlamaConfig`.

Modules are named as in checkpoints, except the merged ``qkv_proj`` and ``gate_up_proj``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn

from opweave.layers import RMSNorm
from opweave_engine.models import config as configs
from opweave_engine.models.blocks import DecoderLayer, GatedMlp, SelfAttention
from opweave_engine.models.causal_lm import PreNormLM

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
SUPPORTED_ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
MIXTURES = MIXTRAL, QWEN3_MOE = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
_QWEN = {
    "max_position_embeddings": 32768, "vocab_size": 151936, "intermediate_size": 22016,
    "num_key_value_heads": 32,
}  # fmt: skip
_MISTRAL = {
    "max_position_embeddings": 131072, "vocab_size": 32000, "intermediate_size": 14336,
    "num_key_value_heads": 8,
}  # fmt: skip
# Values that absent keys have in transformers.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    LLAMA: {"max_position_embeddings": 2048, "vocab_size": 32000, "intermediate_size": 11008},
    MISTRAL: _MISTRAL,
    QWEN2: _QWEN,
    QWEN3: {**_QWEN, "head_dim": 128},
    MIXTRAL: {
        **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    QWEN3_MOE: {
        **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip
# Architectures whose configuration has the key "attention_bias".
_MAY_BE_BIASED = (LLAMA, QWEN3, QWEN3_MOE)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(configs.AttentionConfig):
    """The configuration of a model of the Llama family: Llama, Mistral, Qwen2 or Qwen3.

    Differences between architectures are explicit fields.

    Attributes:
        architecture: one of ``architectures``.
        windows: the size of each layer's sliding window, or None.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether queries and keys are normalized, head by head.
        hidden_act: the activation of the MLPs.
    """

    architectures: ClassVar[tuple[str, ...]] = SUPPORTED_ARCHITECTURES

    architecture: str
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str = configs.key(configs.read_activation, "silu")

    @classmethod
    def from_fields(cls, fields: configs.Fields) -> Self:
        """Read the configuration; defaults of absent keys depend on the architecture."""
        named = fields.texts("architectures")
        if len(named) != 1:
            raise configs.InvalidConfigError(
                f"{fields.name} has 'architectures': {named}; it must name one of "
                f"{', '.join(cls.architectures)}."
            )
        architecture = fields.require("architectures", named[0], *cls.architectures)
        defaults = DEFAULTS[architecture]
        positions = fields.count("max_position_embeddings", defaults["max_position_embeddings"])
        is_biased = fields.flag("attention_bias", False) and architecture in _MAY_BE_BIASED
        return cls.read(
            fields,
            defaults,
            architecture=architecture,
            **_heads(fields, defaults),
            rope=configs.rope_parameters(fields, positions, defaults.get("rope_theta", 10000.0)),
            windows=_windows(fields, architecture),
            qkv_bias=is_biased or architecture == QWEN2,
            o_bias=is_biased,
            mlp_bias=architecture == LLAMA and fields.flag("mlp_bias", False),
            qk_norm=architecture in (QWEN3, QWEN3_MOE),
            **cls._experts(fields, architecture),
        )

    @classmethod
    def _experts(cls, fields: configs.Fields, architecture: str) -> dict[str, Any]:
        """Return the fields of a mixture of experts."""
        return {}


def _heads(fields: configs.Fields, defaults: Mapping[str, Any]) -> dict[str, int]:
    """Read the number of key heads, by default that of query heads, and the size of a head.

    Raises:
        InvalidConfigError: a value is of the wrong type, or does not fit the others.
    """
    shared = "num_key_value_heads"
    hidden = fields.size("hidden_size", defaults.get("hidden_size", 4096))
    heads = fields.size("num_attention_heads", 32)
    absent = heads if shared in fields.values else defaults.get(shared, heads)
    kv_heads = fields.count(shared, absent)
    head_dim = None if "head_dim" in fields.values else defaults.get("head_dim")
    if head_dim is None:
        if "head_dim" not in fields and hidden % heads:
            raise configs.InvalidConfigError(
                f"{fields.name} has no 'head_dim', and 'hidden_size' {hidden} is not a multiple of "
                f"'num_attention_heads' {heads}."
            )
        head_dim = fields.count("head_dim", hidden // heads)
    fields.require_multiple("num_attention_heads", heads, shared, kv_heads)
    if head_dim % 2:
        raise configs.InvalidConfigError(
            f"{fields.name}: the head size {head_dim} is odd; rotary embedding needs pairs."
        )
    return {shared: kv_heads, "head_dim": head_dim}


def _windows(fields: configs.Fields, architecture: str) -> tuple[int | None, ...]:
    """Return the size of each layer's sliding window, or None."""
    layers = fields.size("num_hidden_layers", DEFAULTS[architecture].get("num_hidden_layers", 32))
    has_switch = architecture in (QWEN2, QWEN3, QWEN3_MOE)
    is_off = has_switch and not fields.flag("use_sliding_window", False)
    is_absent = architecture == MIXTRAL and "sliding_window" not in fields
    if architecture == LLAMA or is_off or is_absent or fields.is_null("sliding_window"):
        return (None,) * layers
    window = fields.count("sliding_window", 4096)
    # Ministral's types are in configurations of Mistral.
    types = [] if architecture in MIXTURES else fields.texts("layer_types")
    if not types:
        full, name = 0, "max_window_layers"
        if architecture in (QWEN2, QWEN3):
            full = fields.natural(name, None if fields.is_null(name) else 28)
        return tuple(window if layer >= full else None for layer in range(layers))
    configs.check_layer_types(fields, types, layers)
    return tuple(window if kind == configs.SLIDING else None for kind in types)


class LlamaForCausalLM(PreNormLM[LlamaConfig]):
    """A language model of the Llama family.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
    """

    config_class: ClassVar[type[configs.ModelConfig]] = LlamaConfig

    @classmethod
    def layer(cls, config: LlamaConfig, layer: int, dtype: torch.dtype) -> DecoderLayer:
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
        return DecoderLayer(norm(size), attention, norm(size), cls.mlp(config, layer, dtype))

    @classmethod
    def mlp(cls, config: LlamaConfig, layer: int, dtype: torch.dtype) -> nn.Module:
        """Build the MLP of one layer."""
        activation = configs.gated_activation(config.hidden_act)
        sizes = config.hidden_size, config.intermediate_size
        return GatedMlp(*sizes, activation, bias=config.mlp_bias, dtype=dtype)
