"""The configuration of DeepSeek-V3, read from a checkpoint's ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opweave_engine.models.activations import read_expert_activation
from opweave_engine.models.errors import InvalidConfigError
from opweave_engine.models.fields import Fields
from opweave_engine.models.rope_config import max_positions, rope_parameters, rope_type

_SCORED = 2  # experts of a group


@dataclass(frozen=True)
class DeepseekV3Config:
    """The configuration of a DeepSeek-V3 model. Sizes are named as in ``config.json``.

    Attributes:
        q_lora_rank: None if queries are projected directly.
        rope: ``rope_parameters``, including ``rope_theta``.
        rope_interleave: whether rotated pairs are neighbors instead of elements of the two halves.
        softmax_scale: factor on the scores.
        first_k_dense_replace: the layers before this one have a plain MLP, the others experts.
        num_nextn_predict_layers: the number of multi-token prediction layers at the end of a
            checkpoint, which are not loaded.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    hidden_act: str
    first_k_dense_replace: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    rope_interleave: bool
    softmax_scale: float
    attention_bias: bool
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    dtype: str | None

    @property
    def max_positions(self) -> int:
        """The number of positions that the rope supports."""
        return max_positions(self.rope, self.max_position_embeddings)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DeepseekV3Config:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: the activation, rope, routing or quantization is not supported.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        fields.refuse_quantized()
        _require_routing(fields)
        nope, turned = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
        positions = fields.count("max_position_embeddings", 4096)
        rope = rope_parameters(fields, positions)
        direct = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
        found = cls(
            vocab_size=fields.size("vocab_size", 129280),
            hidden_size=fields.size("hidden_size", 7168),
            intermediate_size=fields.size("intermediate_size", 18432),
            moe_intermediate_size=fields.count("moe_intermediate_size", 2048),
            num_hidden_layers=fields.size("num_hidden_layers", 61),
            num_attention_heads=fields.size("num_attention_heads", 128),
            q_lora_rank=None if direct else fields.count("q_lora_rank", 1536),
            kv_lora_rank=fields.count("kv_lora_rank", 512),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=turned,
            v_head_dim=fields.count("v_head_dim", 128),
            n_routed_experts=fields.count("n_routed_experts", 256),
            n_shared_experts=_shared_experts(fields),
            num_experts_per_tok=fields.count("num_experts_per_tok", 8),
            n_group=fields.count("n_group", 8),
            topk_group=fields.count("topk_group", 4),
            norm_topk_prob=fields.flag("norm_topk_prob", True, null=False),
            routed_scaling_factor=fields.number("routed_scaling_factor", 2.5),
            hidden_act=read_expert_activation(fields),
            first_k_dense_replace=fields.natural("first_k_dense_replace", 3),
            max_position_embeddings=positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            rope_interleave=fields.flag("rope_interleave", True, null=False),
            softmax_scale=_softmax_scale(nope + turned, rope, rope_type(fields)),
            attention_bias=fields.flag("attention_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            num_nextn_predict_layers=fields.natural("num_nextn_predict_layers", 1),
            dtype=fields.dtype(),
        )
        found._check(fields.name)
        return found

    def _check(self, name: str) -> None:
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise InvalidConfigError(
                f"{name} has {self.n_routed_experts} 'n_routed_experts' in {self.n_group} "
                f"'n_group', of which {self.topk_group} 'topk_group' are chosen; groups must be "
                "equal, and no more can be chosen than there are."
            )
        size = self.n_routed_experts // self.n_group
        if size < _SCORED:
            raise InvalidConfigError(
                f"{name} has {self.n_routed_experts} 'n_routed_experts' in {self.n_group} "
                f"'n_group', {size} in each; the score of a group is that of its best {_SCORED}."
            )
        if self.num_experts_per_tok > self.topk_group * size:
            raise InvalidConfigError(
                f"{name} has 'num_experts_per_tok': {self.num_experts_per_tok}, but 'topk_group': "
                f"{self.topk_group} groups of {size} experts hold {self.topk_group * size}."
            )
        if self.qk_rope_head_dim % 2:
            raise InvalidConfigError(
                f"{name} has 'qk_rope_head_dim': {self.qk_rope_head_dim}; rotary embedding needs "
                "pairs."
            )


def _require_routing(fields: Fields) -> None:
    """Raise UnsupportedModelError unless experts are chosen as in DeepSeek-V3."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.require(key, fields.text(key, only), only)
    fields.require("moe_layer_freq", fields.count("moe_layer_freq", 1), 1)


def _shared_experts(fields: Fields) -> int:
    """Return the number of shared experts, which the original configurations write as null."""
    key = "n_shared_experts"
    return 0 if key in fields.values and key not in fields else fields.natural(key, 1)


def _softmax_scale(size: int, rope: Mapping[str, Any], kind: str) -> float:
    stretch = _stretch(rope, kind)
    return float(size**-0.5) * stretch * stretch


def _stretch(rope: Mapping[str, Any], kind: str) -> float:
    """Return the factor on the attention scores for a longer context: YaRN, arXiv:2309.00071."""
    key, factor = "mscale_all_dim", rope.get("factor")
    if kind == "default" or not rope.get(key) or not factor or factor <= 1:
        return 1.0
    every = Fields(rope, "'rope_parameters' in config.json").number(key)
    return 0.1 * every * math.log(factor) + 1.0
