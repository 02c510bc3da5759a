"""The architectures that are compared, and what their configurations need beyond small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runs.families.sizes import WINDOW, shrink

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING = {"sliding_window": WINDOW}
_QWEN_WINDOWS = {
    "use_sliding_window": True,
    **_SLIDING,
    "layer_types": ["full_attention", "sliding_attention"],
}
# Gemma 3n and 4: the last layers reuse the keys and values of earlier ones of their kind.
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_GEMMA3N = {
    **_SHARED,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
}
_GEMMA4 = {**_SHARED, "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}}}
_LLAMA4 = {"moe_layers": [1], "floor_scale": 32}
_DOTS3 = {
    "num_key_value_heads": 4,
    "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_hidden_layers": 3,
    "head_dim": 20,
    "per_layer_config": {
        layer: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24}
        for layer in ("01", "02")
    },
}
_QWEN4 = {
    "eos_token_id": 2,
    "num_experts": 6,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 24,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 2,
}

# By model type; merged into the fields that `shrink` returns. None removes a field.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "beam": {"num_experts": 8},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3, 4],
        **{
            f"{part}_config": {"head_dim": 16, "num_key_value_heads": 4, "hidden_size": 64}
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "full_attention": {**_DEFAULT_ROPE, "mrope_section": [4, 4, 4]},
            "sliding_attention": {**_DEFAULT_ROPE, "mrope_section": [4, 4, 4]},
        },
    },
    "cohere": {"logit_scale": 1.5},
    "cohere2": {"logit_scale": 1.5},
    "cohere2_moe": {"num_shared_experts": 1, "logit_scale": 1.5},
    "cpmant": {"position_bias_num_buckets": 32, "position_bias_max_distance": 128},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "o_groups": 2,
        "num_key_value_heads": 1,
    },
    "doge": {"num_experts": 16, "is_moe": True, "keep_window_size": 64},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "first_k_dense_replace": 1, "layer_types": ["full_attention", "sliding_attention"],
              "num_hidden_layers": 2},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "intermediate_size": 96},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 24},
    "hunyuan_v1_moe": {"head_dim": 24, "num_experts": 6, "moe_topk": 2},
    "granitemoe_swa": {"shared_intermediate_size": 48},
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granitemoeshared": {"shared_intermediate_size": 48},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 3, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": None,
             "num_hidden_layers": 3, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "mamba2": {"head_dim": 16, "num_heads": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "ministral": {"head_dim": 24, "num_hidden_layers": 2},
    "ministral3": {
        "rope_parameters": {
            **_DEFAULT_ROPE,
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mistral": {},
    "mixtral": _SLIDING,
    "mllama": {"text_config": {"cross_attention_layers": [1], "num_hidden_layers": 3}},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "nemotron": {"num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 40, "ffn_dim": 96},
    "phi3": _SLIDING,
    "phimoe": _SLIDING,
    "qwen2": _QWEN_WINDOWS,
    "qwen2_moe": {**_QWEN_WINDOWS, "mlp_only_layers": [0]},
    "qwen3": _QWEN_WINDOWS,
    "qwen3_moe": {"mlp_only_layers": [1], "head_dim": 24},
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [24, 40],
                 "num_buckets": 4, "hash_seed": 1, "attn_layers": ["local", "lsh"]},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": _SLIDING,
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 5,
               "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
               "num_mem_blocks": 2, "num_key_value_heads": 4, "use_mem_rope": True,
               "use_shared_attention_adapter": True},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Other configurations of an architecture: name -> (model type, fields).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere:qk_norm": ("cohere", {"use_qk_norm": True}),
    "deepseek_v2:direct": ("deepseek_v2", {"q_lora_rank": None}),
    "falcon:alibi": ("falcon", {"alibi": True, "num_kv_heads": 4, "multi_query": False}),
    "falcon:grouped": ("falcon", {"new_decoder_architecture": True}),
    "gpt_neox:sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "bamba:mamba": ("bamba", {"attn_layer_indices": []}),
    "gpt2:scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "mpt:learned": ("mpt", {"attn_config": {"alibi": False}}),
    "opt:post_norm": ("opt", {"do_layer_norm_before": False}),
    "stablelm:parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
}


def names() -> list[str]:
    """Return the name of every architecture, and of their variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return *fields* with *changes*; dicts are merged, too."""
    result = dict(fields)
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def make_config(name: str) -> Any:
    """Return a small configuration of an architecture or variant."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    cls = CONFIG_MAPPING[model_type]
    needed = OVERRIDES.get(model_type, {})
    default = _default(cls, needed)
    fields = merged(merged(shrink(default), needed), changes)
    fields.pop("model_type", None)
    return cls(**fields)


def _default(cls: Any, needed: Mapping[str, Any]) -> dict[str, Any]:
    try:
        config = cls()
    except ValueError:  # gemma4_assistant: the default is not a valid configuration
        config = cls(**needed)
    values: dict[str, Any] = config.to_dict()
    return values
