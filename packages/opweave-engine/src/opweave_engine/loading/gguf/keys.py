"""The metadata keys of GGUF files: those that are read, change nothing, or are refused.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp does with the
keys of each architecture. Keys of an architecture are without its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

READ = frozenset((
    "general.alignment", "general.architecture", "general.type",
    "general.sampling.min_p", "general.sampling.penalty_repeat", "general.sampling.temp",
    "general.sampling.top_k", "general.sampling.top_p",
    "split.count",
    *(f"tokenizer.ggml.{key}" for key in (
        "add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "eom_token_id",
        "eos_token_id", "eot_token_id", "merges", "model", "padding_token_id", "pre", "scores",
        "token_type", "tokens", "unknown_token_id",
    )),
    "tokenizer.chat_template", "tokenizer.chat_templates",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length",
    "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.attn_factor",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
))  # fmt: skip
"""Keys that are read for every architecture."""

_EXPERTS = frozenset(("expert_count", "expert_used_count"))
READ_BY: Mapping[str, frozenset[str]] = {
    "llama": _EXPERTS,
    "qwen3moe": _EXPERTS | {"expert_feed_forward_length"},
    "gemma3": frozenset((
        "attention.sliding_window", "attention.sliding_window_pattern",
        "final_logit_softcapping", "rope.freq_base_swa",
    )),
}  # fmt: skip
"""Keys that are read for one architecture and refused for the others."""

HARMLESS = frozenset((
    "general.author", "general.basename", "general.description", "general.doi",
    "general.file_type", "general.finetune", "general.languages", "general.license",
    "general.name", "general.organization", "general.quantized_by", "general.repo_url",
    "general.size_label", "general.tags", "general.url", "general.uuid", "general.version",
    "general.base_model.", "general.dataset.", "general.license.", "general.source.",
    "general.parameter_count",
    *(f"tokenizer.ggml.{key}" for key in (
        "add_sep_token", "fim_mid_token_id", "fim_pad_token_id", "fim_pre_token_id",
        "fim_rep_token_id", "fim_sep_token_id", "fim_suf_token_id", "mask_token_id",
        "middle_token_id", "prefix_token_id", "seperator_token_id", "suffix_token_id",
        "token_type_count",
    )),
    "tokenizer.chat_template.", "tokenizer.huggingface.json",
    "classifier.output_labels", "decoder_start_token_id", "pooling_type", "tensor_data_layout",
    "vocab_size",
    # Norms of these architectures have their epsilon under another key.
    "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.layer_norm_epsilon",
    "rope.scaling.finetuned",
))  # fmt: skip
"""Keys that do not change what a model computes; those that end with a dot are prefixes."""

REFUSED = frozenset((
    "general.quantization_version",
    "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.rwkv.world",
    "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs", "attn_logit_softcapping",
    "decoder_block_count", "embedding_length_out", "embedding_length_per_layer_input",
    "embedding_scale", "expert_chunk_feed_forward_length", "expert_gating_func",
    "expert_group_count", "expert_group_scale", "expert_group_used_count", "expert_shared_count",
    "expert_shared_feed_forward_length", "expert_weights_norm", "expert_weights_scale",
    "experts_per_group", "features_length", "full_attention_interval",
    "interleave_moe_layer_step", "leading_dense_block_count", "logit_scale",
    "moe_every_n_layers", "moe_latent_size", "n_deepstack_layers", "nextn_predict_layers",
    "rescale_every_n_layers", "residual_scale", "router_logit_softcapping", "swiglu_clamp_exp",
    "swiglu_clamp_shexp", "swin_norm", "time_decay_extra_dim", "time_mix_extra_dim",
    "token_shift_count", "use_parallel_residual", "{dense}_feat_in", "{dense}_feat_out",
    *(f"attention.{key}" for key in (
        "causal", "clamp_kqv", "decay_lora_rank", "gate_lora_rank", "iclr_lora_rank",
        "indexer.head_count", "indexer.key_length", "indexer.top_k", "key_length_mla",
        "key_length_swa", "kv_lora_rank", "max_alibi_bias", "output_scale", "q_lora_rank",
        "relative_buckets_count", "scale", "shared_kv_layers", "temperature_length",
        "temperature_scale", "value_length", "value_length_mla", "value_length_swa",
        "value_residual_mix_lora_rank",
    )),
    "convnext.block_count", "convnext.embedding_length", "kda.head_dim",
    "posnet.block_count", "posnet.embedding_length", "shortconv.l_cache",
    "ssm.conv_kernel", "ssm.dt_b_c_rms", "ssm.group_count", "ssm.inner_size", "ssm.state_size",
    "ssm.time_step_rank", "wkv.head_size",
    "rope.dimension_count_swa", "rope.dimension_sections", "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
))  # fmt: skip
"""Keys that change what a model computes, unless the value is zero or what is computed anyway."""

# Sections in which a key that is not listed is an error, since it changes what a model computes.
_STRICT = ("attention.", "rope.")


def refused_keys(
    architecture: str, metadata: Mapping[str, Any], implied: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a file with values that change what the model computes.

    Args:
        architecture: of the model.
        metadata: of the file.
        implied: the value that is computed with, for keys where zero does not stand for it.
    """
    accepted = READ.union(HARMLESS, READ_BY.get(architecture, ()))
    listed = REFUSED.union(*READ_BY.values())
    refused = {}
    for key, value in metadata.items():
        short = key.removeprefix(f"{architecture}.")
        is_strict = short != key and short.startswith(_STRICT)
        if _is_listed(short, accepted) or not (is_strict or short in listed):
            continue
        if not _agrees(value, implied.get(short)):
            refused[key] = value
    return refused


def unread_keys(architecture: str, metadata: Mapping[str, Any]) -> list[str]:
    """Return the keys of the file's and the model's own sections that are not on any list."""
    prefix = f"{architecture}."
    lists = READ.union(HARMLESS, REFUSED, *READ_BY.values())
    return [
        key
        for key in metadata
        if key.startswith(("general.", "tokenizer.", prefix))
        and not _is_listed(key.removeprefix(prefix), lists)
        and not key.removeprefix(prefix).startswith(_STRICT)
    ]


def _is_listed(key: str, keys: Collection[str]) -> bool:
    parts = key.split(".")
    return key in keys or any(".".join([*parts[:n], ""]) in keys for n in range(1, len(parts)))


def _agrees(value: Any, implied: Any) -> bool:
    """Return whether *value* is zero, empty or *implied*."""
    if isinstance(implied, bool) or isinstance(value, str):
        return bool(value == implied)
    if isinstance(value, list):
        return not value
    is_close = implied is not None and np.allclose(value, implied, rtol=1e-5, atol=0)
    return not np.any(value) or bool(np.size(value) and is_close)
