"""Mixtral and Qwen3-MoE: language models of Llama's form with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from opweave.layers import (
    FusedMoE,
    ReplicatedLinear,
    RMSNorm,
)
from opweave_engine.models.blocks import DecoderLayer, GatedMlp, SelfAttention
from opweave_engine.models.causal_lm import PreNormLM
from opweave_engine.models.config import (
    Fields,
    InvalidConfigError,
    expert_activation,
    gated_activation,
    max_positions,
    read_expert_activation,
    read_heads,
    rope_parameters,
)
from opweave_engine.models.weights import FusedWeightTarget, WeightTarget

# The configuration of Mixtral and Qwen3-MoE, read from a checkpoint's ``config.json``.


MIXTRAL, QWEN3_MOE = "MixtralForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class MixtureConfig:
    """The configuration of a Llama-like model with a mixture of experts.

    Sizes are named as in ``config.json``.

    Attributes:
        intermediate_size: the intermediate size of layers without experts.
        moe_intermediate_size: the intermediate size of one expert.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        sparse_layers: for each layer, whether it has experts.
        rope: ``rope_parameters``, including ``rope_theta``.
        hidden_act: the activation of experts and MLPs.
        sliding_window: the window size of attention, or None.
        attention_bias: whether the linear layers of attention have a bias.
        qk_norm: whether queries and keys are normalized, head by head.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    hidden_act: str
    sliding_window: int | None
    attention_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str | None

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""
        return len(self.sparse_layers)

    @property
    def max_positions(self) -> int:
        """The number of positions that the rope supports."""
        return max_positions(self.rope, self.max_position_embeddings)

    @classmethod
    def mixtral(cls, config: Mapping[str, Any]) -> MixtureConfig:
        """Read the ``config.json`` of Mixtral, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation, rope or quantization that is not supported.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        size = fields.count("intermediate_size", 14336)
        return cls(
            **_common(
                fields,
                kv_heads=8,
                theta=1e6,
                positions=131072,
                epsilon=1e-5,
                vocab_size=32000,
                hidden_size=4096,
            ),
            intermediate_size=size,
            moe_intermediate_size=size,
            **_experts(fields, "num_local_experts", 8, 2),
            norm_topk_prob=True,
            sparse_layers=(True,) * fields.size("num_hidden_layers", 32),
            sliding_window=_window(fields, None),
            attention_bias=False,
            qk_norm=False,
        )

    @classmethod
    def qwen3_moe(cls, config: Mapping[str, Any]) -> MixtureConfig:
        """Read the ``config.json`` of Qwen3-MoE; as :meth:`mixtral`."""
        fields = Fields(config)
        key = "num_experts" if "num_experts" in fields else "num_local_experts"
        windowed = fields.flag("use_sliding_window", False)
        return cls(
            **_common(
                fields,
                kv_heads=4,
                theta=10000.0,
                positions=32768,
                epsilon=1e-6,
                vocab_size=151936,
                hidden_size=2048,
            ),
            intermediate_size=fields.count("intermediate_size", 6144),
            moe_intermediate_size=fields.count("moe_intermediate_size", 768),
            **_experts(fields, key, 128, 8),
            norm_topk_prob=fields.flag("norm_topk_prob", False),
            sparse_layers=_sparse(fields),
            sliding_window=_window(fields, 4096) if windowed else None,
            attention_bias=fields.flag("attention_bias", False),
            qk_norm=True,
        )


def _common(
    fields: Fields,
    *,
    kv_heads: int,
    theta: float,
    positions: int,
    epsilon: float,
    vocab_size: int,
    hidden_size: int,
) -> dict[str, Any]:
    """Read the common keys; the arguments are the defaults of missing keys."""
    fields.refuse_quantized()
    positions = fields.count("max_position_embeddings", positions)
    return {
        "vocab_size": fields.size("vocab_size", vocab_size),
        "hidden_size": fields.size("hidden_size", hidden_size),
        **read_heads(fields, kv_heads=kv_heads, hidden_size=hidden_size),
        "max_position_embeddings": positions,
        "rms_norm_eps": fields.number("rms_norm_eps", epsilon),
        "rope": rope_parameters(fields, positions, theta),
        "hidden_act": read_expert_activation(fields),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "dtype": fields.dtype(),
    }


def _experts(fields: Fields, key: str, experts: int, chosen: int) -> dict[str, Any]:
    found, top = fields.count(key, experts), fields.count("num_experts_per_tok", chosen)
    if top > found:
        raise InvalidConfigError(
            f"{fields.name} has 'num_experts_per_tok': {top}, but {key!r}: {found}."
        )
    return {"num_experts": found, "num_experts_per_tok": top}


def _window(fields: Fields, absent: int | None) -> int | None:
    if "sliding_window" not in fields.values:
        return absent
    return fields.count("sliding_window") if "sliding_window" in fields else None


def _sparse(fields: Fields) -> tuple[bool, ...]:
    step, plain = fields.count("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise InvalidConfigError(
            f"{fields.name} has 'mlp_only_layers': {plain!r}; it must be a list of integers."
        )
    layers = range(fields.size("num_hidden_layers", 24))
    return tuple(layer not in plain and (layer + 1) % step == 0 for layer in layers)


# Language models of Llama's form with a mixture of experts in place of the MLP.


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


# Mixtral (arXiv:2401.04088).


class MixtralForCausalLM(MixtureForCausalLM):
    """A Mixtral language model: every layer has experts."""

    experts: ClassVar[tuple[str, str, str]] = ("w1", "w2", "w3")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(MixtureConfig.mixtral(config), dtype=dtype)

    def own_name(self, name: str) -> str:
        return _original(name)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # transformers 5 names the block "mlp" where it writes all experts into one tensor.
        super().load_weights((self.own_name(name), tensor) for name, tensor in tensors)

    def places(self) -> dict[str, WeightTarget]:
        return {_original(name): place for name, place in super().places().items()}

    def fused_places(self) -> dict[str, FusedWeightTarget]:
        return {
            _original(name): FusedWeightTarget(
                fused.place, frozenset(map(_original, fused.replaced))
            )
            for name, fused in super().fused_places().items()
        }


def _original(name: str) -> str:
    """Return the name of a tensor in the original checkpoints."""
    return name.replace(".mlp.", ".block_sparse_moe.")


# Qwen3 with a mixture of experts (arXiv:2505.09388).


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    """A Qwen3-MoE language model: some layers have experts, the others an MLP."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(MixtureConfig.qwen3_moe(config), dtype=dtype)
