"""DeepSeek-V3: latent attention and a mixture of experts (arXiv:2412.19437)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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
    EXPERT_ACTIVATIONS,
    DecoderConfig,
    Fields,
    InvalidConfigError,
    gated_activation,
    key,
    read_expert_activation,
    rope_parameters,
    rope_type,
)
from opweave_engine.models.weights import Merged

# The configuration of DeepSeek-V3, read from a checkpoint's ``config.json``.


_EXPERTS_PER_GROUP_SCORE = 2  # a group's score is the sum of its two highest expert scores


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DecoderConfig):
    """The configuration of a DeepSeek-V3 model. Sizes are named as in ``config.json``.

    Attributes:
        q_lora_rank: None if queries are projected directly.
        rope_interleave: whether rotated pairs are neighbors instead of elements of the two halves.
        softmax_scale: factor on the scores.
        n_shared_experts: the original configurations write null for none.
        first_k_dense_replace: the layers before this one have a plain MLP, the others experts.
        num_nextn_predict_layers: the number of multi-token prediction layers at the end of a
            checkpoint, which are not loaded.
    """

    vocab_size: int = key(Fields.size, 129280)
    hidden_size: int = key(Fields.size, 7168)
    intermediate_size: int = key(Fields.size, 18432)
    moe_intermediate_size: int = key(Fields.count, 2048)
    num_hidden_layers: int = key(Fields.size, 61)
    num_attention_heads: int = key(Fields.size, 128)
    q_lora_rank: int | None = key(Fields.count, 1536, null=None)
    kv_lora_rank: int = key(Fields.count, 512)
    qk_nope_head_dim: int = key(Fields.count, 128)
    qk_rope_head_dim: int = key(Fields.count, 64)
    v_head_dim: int = key(Fields.count, 128)
    n_routed_experts: int = key(Fields.count, 256)
    n_shared_experts: int = key(Fields.natural, 1, null=0)
    num_experts_per_tok: int = key(Fields.count, 8)
    n_group: int = key(Fields.count, 8)
    topk_group: int = key(Fields.count, 4)
    norm_topk_prob: bool = key(Fields.flag, True, null=False)
    routed_scaling_factor: float = key(Fields.number, 2.5)
    hidden_act: str = key(read_expert_activation, "silu")
    first_k_dense_replace: int = key(Fields.natural, 3)
    max_position_embeddings: int = key(Fields.count, 4096)
    rope_interleave: bool = key(Fields.flag, True, null=False)
    softmax_scale: float
    attention_bias: bool = key(Fields.flag, False)
    num_nextn_predict_layers: int = key(Fields.natural, 1)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            fields.require(name, fields.text(name, only), only)
        fields.require("moe_layer_freq", fields.count("moe_layer_freq", 1), 1)
        rope = rope_parameters(fields, fields.count("max_position_embeddings", 4096))
        size = fields.count("qk_nope_head_dim", 128) + fields.count("qk_rope_head_dim", 64)
        scale = float(size**-0.5) * _stretch(rope, rope_type(fields)) ** 2
        config = cls.read(fields, rope=rope, softmax_scale=scale)
        config._check(fields.name)
        return config

    def _check(self, name: str) -> None:
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise InvalidConfigError(
                f"{name} has {self.n_routed_experts} 'n_routed_experts' in {self.n_group} "
                f"'n_group', of which {self.topk_group} 'topk_group' are chosen; groups must be "
                "equal, and no more can be chosen than there are."
            )
        size = self.n_routed_experts // self.n_group
        if size < _EXPERTS_PER_GROUP_SCORE:
            raise InvalidConfigError(
                f"{name} has {self.n_routed_experts} 'n_routed_experts' in {self.n_group} "
                f"'n_group', {size} in each; a group's score is the sum of its "
                f"best {_EXPERTS_PER_GROUP_SCORE}."
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


def _stretch(rope: Mapping[str, Any], kind: str) -> float:
    """Return the factor on the attention scores for a longer context: YaRN, arXiv:2309.00071."""
    name, factor = "mscale_all_dim", rope.get("factor")
    if kind == "default" or not rope.get(name) or not factor or factor <= 1:
        return 1.0
    weight = Fields(rope, "'rope_parameters' in config.json").number(name)
    return 0.1 * weight * math.log(factor) + 1.0


# The model.


# The norms of latent vectors do not follow rms_norm_eps.
_LATENT_EPSILON = 1e-6


class DeepseekMoE(nn.Module):
    """Routed experts, chosen by group, and shared ones."""

    def __init__(self, config: DeepseekV3Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.moe_intermediate_size
        experts = config.n_routed_experts
        # The scores of experts lie close to each other: they are computed in float32.
        self.gate = ReplicatedLinear(
            hidden, experts, bias=False, params_dtype=torch.float32, return_bias=False
        )
        correction = nn.Parameter(torch.zeros(experts, dtype=torch.float32))
        self.gate.e_score_correction_bias = correction
        self.shared_experts = None
        if config.n_shared_experts:
            activation = gated_activation(config.hidden_act)
            shared = config.n_shared_experts * size
            self.shared_experts = GatedMlp(
                hidden, shared, activation, dtype=dtype, reduce_results=False
            )
        self.experts = FusedMoE(
            experts, config.num_experts_per_tok, hidden, size, dtype,
            renormalize=config.norm_topk_prob, activation=EXPERT_ACTIVATIONS[config.hidden_act],
            use_grouped_topk=True, num_expert_group=config.n_group, topk_group=config.topk_group,
            scoring_func="sigmoid", routed_scaling_factor=config.routed_scaling_factor,
            e_score_correction_bias=correction, shared_experts=self.shared_experts,
        )  # fmt: skip

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.experts(hidden, self.gate(hidden.float()))
        return mixed


class DeepseekV3ForCausalLM(PreNormLM[DeepseekV3Config]):
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

    config_class = DeepseekV3Config

    @classmethod
    def layer(cls, config: DeepseekV3Config, layer: int, dtype: torch.dtype) -> DecoderLayer:
        size, norm = config.hidden_size, partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = latent_attention(config, layer, dtype)
        if layer >= config.first_k_dense_replace:
            return DecoderLayer(norm(size), attention, norm(size), DeepseekMoE(config, dtype))
        activation = gated_activation(config.hidden_act)
        mlp = GatedMlp(size, config.intermediate_size, activation, dtype=dtype)
        return DecoderLayer(norm(size), attention, norm(size), mlp)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        end = self.config.num_hidden_layers
        further = range(end, end + self.config.num_nextn_predict_layers)
        prefixes = tuple(f"model.layers.{layer}." for layer in further)
        # transformers writes empty tensors if there are no shared experts.
        super().load_weights(
            (name, tensor)
            for name, tensor in tensors
            if not name.startswith(prefixes) and (tensor.numel() or "shared_experts" not in name)
        )


def latent_attention(
    config: DeepseekV3Config, layer: int, dtype: torch.dtype
) -> MultiHeadLatentAttentionWrapper:
    """Build the attention of one layer, with this rank's heads."""
    hidden, heads, biased = config.hidden_size, config.num_attention_heads, config.attention_bias
    nope, rotated, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    query_rank, rank = config.q_lora_rank, config.kv_lora_rank
    row, query_size, kv_size = rank + rotated, heads * (nope + rotated), heads * (nope + value)
    modules: dict[str, nn.Module]
    if query_rank is None:
        modules = {
            "kv_a_proj_with_mqa": ReplicatedLinear(hidden, row, bias=biased, params_dtype=dtype),
            "q_proj": ColumnParallelLinear(hidden, query_size, bias=False, params_dtype=dtype),
        }
    else:
        modules = {
            "fused_qkv_a_proj": MergedColumnParallelLinear(
                hidden, [query_rank, row], bias=biased, params_dtype=dtype, disable_tp=True
            ),
            "q_a_layernorm": RMSNorm(query_rank, _LATENT_EPSILON, dtype=dtype),
            "q_b_proj": ColumnParallelLinear(
                query_rank, query_size, bias=False, params_dtype=dtype
            ),
        }
    positions, is_neox = config.max_position_embeddings, not config.rope_interleave
    rope = get_rope(
        rotated, positions, is_neox, config.rope, dtype, max_model_len=config.max_positions
    )
    local_heads = current_tensor_parallel().divide(heads, "num_attention_heads")
    return MultiHeadLatentAttentionWrapper(
        hidden, local_heads, config.softmax_scale, nope, rotated, value, query_rank, rank,
        MLAModules(
            kv_a_layernorm=RMSNorm(rank, _LATENT_EPSILON, dtype=dtype),
            kv_b_proj=ColumnParallelLinear(rank, kv_size, bias=False, params_dtype=dtype),
            rotary_emb=rope,
            o_proj=RowParallelLinear(heads * value, hidden, bias=biased, params_dtype=dtype),
            **modules,
        ),
        attention=LatentAttention(layer, local_heads, row),
    )  # fmt: skip
