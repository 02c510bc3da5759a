"""DeepSeek-V3: latent attention and a mixture of experts (arXiv:2412.19437)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from opweave.layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    MLAModules,
    MultiHeadLatentAttentionWrapper,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    get_rope,
)
from opweave.layers.parallel import current_tensor_parallel
from opweave_engine.models.blocks import DecoderLayer, GatedMlp, LatentAttention
from opweave_engine.models.causal_lm import CausalLM, PreNormLM
from opweave_engine.models.config import (
    Fields,
    InvalidConfigError,
    expert_activation,
    gated_activation,
    max_positions,
    read_expert_activation,
    rope_parameters,
    rope_type,
)
from opweave_engine.models.weights import Merged

# The configuration of DeepSeek-V3, read from a checkpoint's ``config.json``.


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


# The model.


# The norms of latent vectors do not follow rms_norm_eps.
_LATENT_EPSILON = 1e-6


class DeepseekMoE(nn.Module):
    """Routed experts, chosen by group, and shared ones."""

    def __init__(self, config: DeepseekV3Config, dtype: torch.dtype) -> None:
        super().__init__()
        # The scores of experts lie close to each other: they are computed in float32.
        self.gate = ReplicatedLinear(
            config.hidden_size,
            config.n_routed_experts,
            bias=False,
            params_dtype=torch.float32,
            return_bias=False,
        )
        correction = nn.Parameter(torch.zeros(config.n_routed_experts, dtype=torch.float32))
        self.gate.e_score_correction_bias = correction
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = GatedMlp(
                config.hidden_size,
                config.n_shared_experts * config.moe_intermediate_size,
                gated_activation(config.hidden_act),
                dtype=dtype,
                reduce_results=False,
            )
        self.experts = FusedMoE(
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            dtype,
            renormalize=config.norm_topk_prob,
            activation=expert_activation(config.hidden_act),
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func="sigmoid",
            routed_scaling_factor=config.routed_scaling_factor,
            e_score_correction_bias=correction,
            shared_experts=self.shared_experts,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.experts(hidden, self.gate(hidden.float()))
        return mixed


class DeepseekV3ForCausalLM(PreNormLM):
    """A DeepSeek-V3 language model.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
    """

    merged: ClassVar[Merged] = {
        "fused_qkv_a_proj": {"q_a_proj": 0, "kv_a_proj_with_mqa": 1},
        "gate_up_proj": CausalLM.merged["gate_up_proj"],
    }
    dense: ClassVar[frozenset[str]] = frozenset({"kv_b_proj"})  # the attention reads its weight

    def __init__(self, config: DeepseekV3Config, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, lambda i: deepseek_layer(config, i, dtype), dtype=dtype)
        self.config = config

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(DeepseekV3Config.from_hf(config), dtype=dtype)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(self._own(tensors))

    def _own(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors except those of multi-token prediction layers and empty ones.

        transformers writes empty tensors if there are no shared experts.
        """
        end = self.config.num_hidden_layers
        others = range(end, end + self.config.num_nextn_predict_layers)
        prefixes = tuple(f"model.layers.{layer}." for layer in others)
        return (
            (name, tensor)
            for name, tensor in tensors
            if not name.startswith(prefixes) and (tensor.numel() or "shared_experts" not in name)
        )


def deepseek_layer(config: DeepseekV3Config, layer: int, dtype: torch.dtype) -> DecoderLayer:
    """Build one block: latent attention, and an MLP or experts."""
    size, epsilon = config.hidden_size, config.rms_norm_eps
    return DecoderLayer(
        RMSNorm(size, epsilon, dtype=dtype),
        latent_attention(config, layer, dtype),
        RMSNorm(size, epsilon, dtype=dtype),
        GatedMlp(size, config.intermediate_size, gated_activation(config.hidden_act), dtype=dtype)
        if layer < config.first_k_dense_replace
        else DeepseekMoE(config, dtype),
    )


def latent_attention(
    config: DeepseekV3Config, layer: int, dtype: torch.dtype
) -> MultiHeadLatentAttentionWrapper:
    """Build the attention of one layer, with this rank's heads."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    query_size = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    value_size = heads * config.v_head_dim
    rope = get_rope(
        config.qk_rope_head_dim,
        config.max_position_embeddings,
        not config.rope_interleave,
        config.rope,
        dtype,
        max_model_len=config.max_positions,
    )
    modules = MLAModules(
        kv_a_layernorm=RMSNorm(config.kv_lora_rank, _LATENT_EPSILON, dtype=dtype),
        kv_b_proj=ColumnParallelLinear(
            config.kv_lora_rank,
            heads * config.qk_nope_head_dim + value_size,
            bias=False,
            params_dtype=dtype,
        ),
        rotary_emb=rope,
        o_proj=RowParallelLinear(
            value_size, hidden, bias=config.attention_bias, params_dtype=dtype
        ),
        **_query_modules(config, query_size, dtype),
    )
    own_heads = current_tensor_parallel().divide(heads, "num_attention_heads")
    return MultiHeadLatentAttentionWrapper(
        hidden,
        own_heads,
        config.softmax_scale,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.q_lora_rank,
        config.kv_lora_rank,
        modules,
        attention=LatentAttention(layer, own_heads, config.kv_lora_rank + config.qk_rope_head_dim),
    )


def _query_modules(
    config: DeepseekV3Config, query_size: int, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """Return what leads to queries and to the latent vectors of keys."""
    hidden, rank, biased = config.hidden_size, config.q_lora_rank, config.attention_bias
    row = config.kv_lora_rank + config.qk_rope_head_dim
    if rank is None:
        return {
            "kv_a_proj_with_mqa": ReplicatedLinear(hidden, row, bias=biased, params_dtype=dtype),
            "q_proj": ColumnParallelLinear(hidden, query_size, bias=False, params_dtype=dtype),
        }
    return {
        "fused_qkv_a_proj": MergedColumnParallelLinear(
            hidden, [rank, row], bias=biased, params_dtype=dtype, disable_tp=True
        ),
        "q_a_layernorm": RMSNorm(rank, _LATENT_EPSILON, dtype=dtype),
        "q_b_proj": ColumnParallelLinear(rank, query_size, bias=False, params_dtype=dtype),
    }
