"""Small values for the fields of transformers' configurations, by the names of the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY = 199
CONTEXT = 512
WINDOW = 16  # shorter than most prompts, so that it hides tokens
SPECIAL = 4  # prompts hold none of the first ids: padding tokens change positions in some models


def _same(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


# A field is set where its default is a number; see `shrink`.
SIZES: dict[str, Any] = {
    **_same(VOCABULARY, "vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"),
    **_same(
        64, "hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "embedding_dim",
        "word_embed_proj_dim", "lru_width", "attention_hidden_size", "input_embedding_size",
        "output_embedding_size", "hidden_size_global", "ple_embed_dim",
    ),
    **_same(
        96, "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim",
        "ffn_hidden_size", "dff", "dim_ff", "d_inner", "feed_forward_size", "intermediate_size_mlp",
        "dense_intermediate_size", "shared_intermediate_size", "mlp_dim",
    ),
    **_same(
        40, "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
        "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
    ),
    **_same(
        2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
        "encoder_layers", "num_decoder_layers", "num_encoder_layers", "depth",
    ),
    **_same(
        4, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
        "attention_heads", "swa_num_attention_heads", "linear_num_heads", "linear_num_value_heads",
    ),
    # Enough that their scores are not all 0 after ReLU: a choice of equal ones is arbitrary.
    **_same(16, "index_n_heads"),
    **_same(
        2, "num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads",
        "linear_num_key_heads",
    ),
    **_same(24, "head_dim", "swa_head_dim", "dim_head", "d_head", "kv_channels"),
    **_same(16, "index_head_dim", "linear_head_dim", "linear_key_head_dim", "attention_head_size"),
    **_same(8, "rotary_dim", "qk_rope_head_dim", "linear_value_head_dim", "d_rel"),
    **_same(12, "qk_nope_head_dim", "dt_rank", "laurel_rank", "adapter_rank", "gated_norm_rank"),
    **_same(10, "v_head_dim"),
    **_same(20, "kv_lora_rank", "o_lora_rank", "hc_lowrank"),
    **_same(28, "q_lora_rank", "hidden_size_per_layer_input"),
    **_same(
        6, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    ),
    **_same(
        2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k",
        "top_k_experts",
    ),
    **_same(1, "first_k_dense_replace", "num_dense_layers", "zero_expert_num"),
    **_same(2, "n_group", "num_expert_group"),
    **_same(1, "topk_group"),
    **_same(
        CONTEXT, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
        "model_max_length", "max_target_positions", "context_length", "keep_window_size",
        "rel_extent",
    ),
    **_same(
        WINDOW, "sliding_window", "sliding_window_size", "attention_window_size", "window_size",
        "local_attention", "attention_chunk_size", "index_topk", "chunk_size", "mamba_chunk_size",
        "lsh_attn_chunk_length", "local_attn_chunk_length", "block_size", "index_block_size",
        "local_attention_window_len",
    ),
    **_same(13, "query_pre_attn_scalar"),
    **_same(12, "mamba_d_state", "state_size", "ssm_state_size"),
    **_same(8, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    **_same(16, "mamba_d_head", "mamba_head_dim", "mamba_headdim"),
    **_same(128, "mamba_d_ssm"),
    **_same(2, "mamba_n_groups", "n_groups", "mamba_ngroups"),
    **_same(5, "mamba_dt_rank", "time_step_rank"),
    **_same(30, "image_size"),
    **_same(10, "patch_size"),
    **_same(
        VOCABULARY - 1, "image_token_id", "image_token_index", "audio_token_id", "video_token_id",
    ),
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_LATENT = {
    "head_dim": SIZES["qk_rope_head_dim"],
    "num_key_value_heads": SIZES["num_attention_heads"],
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST_LAYERS = 5


def shrink(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return small values for the fields of a default configuration, and of its parts.

    Lists with one value for each layer keep one layer of every kind, in their order.
    """
    small: dict[str, Any] = {}
    for name, value in default.items():
        if isinstance(value, Mapping) and "model_type" in value:
            small[name] = shrink(value)
            if value["model_type"]:
                small[name]["model_type"] = value["model_type"]
        elif name in TOKENS and value is not None:
            small[name] = TOKENS[name]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value:
            small[name] = SIZES[name]
    if "qk_rope_head_dim" in small:  # latent attention
        small |= {name: value for name, value in _LATENT.items() if name in small}
    if default.get("is_decoder") is False:  # an encoder's layers, which else see all tokens
        small["is_decoder"] = True
    return {**small, **_kinds_of_layers(default)}


def _kinds_of_layers(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the per-layer lists and their length, with one layer of each combination."""
    field = next((name for name in _LAYERS if isinstance(default.get(name), int)), None)
    if field is None:
        return {}
    lists = {
        name: value
        for name, value in default.items()
        if isinstance(value, list) and len(value) == default[field] > _MOST_LAYERS
    }
    if not lists:
        return {}
    kept: dict[Any, int] = {}
    for index, combination in enumerate(zip(*lists.values(), strict=True)):
        kept.setdefault(tuple(map(str, combination)), index)
    indices = sorted(kept.values())[:_MOST_LAYERS]
    if len(indices) == 1:
        indices.append(indices[0] + 1)
    small = {name: [value[index] for index in indices] for name, value in lists.items()}
    return {**small, field: len(indices)}
