"""Small random checkpoints of the models that are made of layers, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from models.tiny_checkpoints import SIZES, YARN

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2}
_MIXTRAL: dict[str, Any] = {**_MIXTURE, "num_local_experts": 6}
_QWEN: dict[str, Any] = {**_MIXTURE, "num_experts": 6, "moe_intermediate_size": 40, "head_dim": 24}
_MAMBA: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 4,
}
# Name -> (model type, what differs from SIZES).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", {**_DEEPSEEK, "rope_parameters": YARN}),
    "deepseek_direct": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek_one_layer": (
        "deepseek_v3",
        {**_DEEPSEEK, "num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3_untied": (
        "gemma3_text",
        {**_GEMMA, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral_window": (
        "mixtral",
        {**_MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "mixtral_one_layer": ("mixtral", {**_MIXTRAL, "num_hidden_layers": 1}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {
            **_QWEN,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": ("mamba2", _MAMBA),
    "mamba2_one_group": (
        "mamba2",
        {**_MAMBA, "n_groups": 1, "use_bias": True, "use_conv_bias": False},
    ),
    "mamba2_tied": ("mamba2", {**_MAMBA, "tie_word_embeddings": True, "residual_in_fp32": False,
                               "conv_kernel": 3}),
    "mamba2_one_layer": ("mamba2", {**_MAMBA, "num_hidden_layers": 1}),
    "mamba2_limits": ("mamba2", {**_MAMBA, "time_step_limit": [0.3, 0.8], "chunk_size": 256}),
    "bert": ("bert", {}),
    "bert_one_layer": ("bert", {"num_hidden_layers": 1}),
    "bert_gelu_new": ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
}  # fmt: skip


def hf_model(kind: str, **changes: Any) -> Any:
    """Return transformers' model of that kind, with random weights and *changes* of its config."""
    torch.manual_seed(sum(map(ord, kind)))
    model_type, differences = KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**SIZES, **differences, **changes})
    factory = AutoModel if model_type == "bert" else AutoModelForCausalLM
    attention = {} if model_type == "mamba2" else {"attn_implementation": "eager"}
    return randomized(factory.from_config(config, **attention))


def write_checkpoint(path: Path, kind: str) -> Any:
    """Save a model of that kind in *path*; return transformers' model."""
    model = hf_model(kind)
    model.save_pretrained(path)
    return model


def gpt_oss_block() -> tuple[dict[str, Any], Any]:
    """Return a configuration of gpt-oss, and transformers' block of experts."""
    differences = {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.5}
    config = GptOssConfig(**{**SIZES, **differences})
    torch.manual_seed(5)
    return config.to_dict(), randomized(GptOssMLP(config))


def randomized(model: Any) -> Any:
    """Give every weight a random value, large enough to show in the results."""
    model = model.float().eval()
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, weight in weights.items():
            if "e_score_correction_bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.1)
            elif isinstance(weight, torch.nn.Parameter):
                center = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
                spread = 0.3 if "norm" in name.lower() else 0.12
                weight.copy_(center + spread * torch.randn_like(weight))
    return model
