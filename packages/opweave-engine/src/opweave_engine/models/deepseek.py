"""DeepSeek-V3: latent attention and a mixture of experts (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
from opweave_engine.models.activations import expert_activation, gated_activation
from opweave_engine.models.causal_lm import CausalLM
from opweave_engine.models.decoder_layer import DecoderLayer
from opweave_engine.models.deepseek_config import DeepseekV3Config
from opweave_engine.models.latent_attention import LatentAttention
from opweave_engine.models.mlp import GatedMlp
from opweave_engine.models.pre_norm_lm import PreNormLM
from opweave_engine.models.weights import Merged

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
