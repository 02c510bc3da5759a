"""Mixtral and Qwen3-MoE: language models of Llama's form with a mixture of experts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opweave.layers import FusedMoE, ReplicatedLinear
from opweave_engine.models.config import (
    EXPERT_ACTIVATIONS,
    Fields,
    InvalidConfigError,
    key,
    read_expert_activation,
)
from opweave_engine.models.llama import DEFAULTS, MIXTRAL, MIXTURES, LlamaConfig, LlamaForCausalLM
from opweave_engine.models.weights import FusedWeightTarget, WeightTarget


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    """The configuration of a Llama-like model with a mixture of experts.

    Attributes:
        intermediate_size: the intermediate size of layers without experts.
        moe_intermediate_size: the intermediate size of one expert.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        sparse_layers: for each layer, whether it has experts.
        hidden_act: the activation of experts and MLPs.
    """

    architectures: ClassVar[tuple[str, ...]] = MIXTURES

    moe_intermediate_size: int = key(Fields.count, 768)
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = key(Fields.flag, False)
    sparse_layers: tuple[bool, ...]
    hidden_act: str = key(read_expert_activation, "silu")

    @classmethod
    def _experts(cls, fields: Fields, architecture: str) -> dict[str, Any]:
        defaults, is_mixtral = DEFAULTS[architecture], architecture == MIXTRAL
        name = "num_experts" if "num_experts" in fields and not is_mixtral else "num_local_experts"
        values = read_experts(
            fields, name, defaults["num_experts"], defaults["num_experts_per_tok"]
        )
        if not is_mixtral:
            return {**values, "sparse_layers": _sparse(fields, defaults["num_hidden_layers"])}
        layers = fields.size("num_hidden_layers", 32)
        size = fields.size("intermediate_size", defaults["intermediate_size"])
        values |= {"moe_intermediate_size": size, "norm_topk_prob": True}
        return {**values, "sparse_layers": (True,) * layers}


def read_experts(fields: Fields, key: str, experts: int, chosen: int) -> dict[str, Any]:
    """Read the number of experts, and that of a token's.

    Args:
        fields: the configuration.
        key: of the number of experts.
        experts, chosen: the defaults.
    """
    count, top_k = fields.count(key, experts), fields.count("num_experts_per_tok", chosen)
    if top_k > count:
        raise InvalidConfigError(
            f"{fields.name} has 'num_experts_per_tok': {top_k}, but {key!r}: {count}."
        )
    return {"num_experts": count, "num_experts_per_tok": top_k}


def _sparse(fields: Fields, layers: int) -> tuple[bool, ...]:
    step, dense = fields.count("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.wrong("mlp_only_layers", dense, "a list of integers")
    indices = range(fields.size("num_hidden_layers", layers))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in indices)


class MixtureOfExperts(nn.Module):
    """Experts and their router, a linear layer."""

    def __init__(self, config: MixtureConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_experts
        self.gate = ReplicatedLinear(
            hidden, experts, bias=False, params_dtype=dtype, return_bias=False
        )
        self.experts = FusedMoE(
            experts,
            config.num_experts_per_tok,
            hidden,
            config.moe_intermediate_size,
            dtype,
            renormalize=config.norm_topk_prob,
            activation=EXPERT_ACTIVATIONS[config.hidden_act],
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.experts(hidden, self.gate(hidden))
        return mixed


class MixtureForCausalLM(LlamaForCausalLM):
    """A language model with a mixture of experts in place of the MLP.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
    """

    config_class = MixtureConfig

    @classmethod
    def mlp(cls, config: LlamaConfig, layer: int, dtype: torch.dtype) -> nn.Module:
        assert isinstance(config, MixtureConfig), f"{type(config)=}"
        if config.sparse_layers[layer]:
            return MixtureOfExperts(config, dtype)
        return super().mlp(config, layer, dtype)


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    """A Qwen3-MoE language model (arXiv:2505.09388): some layers have experts, the others not."""


class MixtralForCausalLM(MixtureForCausalLM):
    """A Mixtral language model (arXiv:2401.04088): every layer has experts."""

    experts: ClassVar[tuple[str, str, str]] = ("w1", "w2", "w3")

    def own_name(self, name: str) -> str:
        """Return the name of a tensor in the original checkpoints."""
        return name.replace(".mlp.", ".block_sparse_moe.")

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # transformers 5 names the block "mlp" where it writes all experts into one tensor.
        super().load_weights((self.own_name(name), tensor) for name, tensor in tensors)

    def places(self) -> dict[str, WeightTarget]:
        return {self.own_name(name): place for name, place in super().places().items()}

    def fused_places(self) -> dict[str, FusedWeightTarget]:
        return {
            self.own_name(name): FusedWeightTarget(place, frozenset(map(self.own_name, replaced)))
            for name, (place, replaced) in super().fused_places().items()
        }
