"""The ``config.json`` that a GGUF file's metadata stands for.

Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp
computes from them.
"""

from __future__ import annotations

from typing import Any

from opweave.engine.errors import CheckpointError
from opweave.engine.loading.gguf.file import GgufFile
from opweave.models import UnsupportedModelError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_LARGEST_GEMMA3 = 62  # layers of Gemma 3 27B, whose scores have a scale of their own
_EMBEDDING, _OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the object of a ``config.json``.

    Raises:
        CheckpointError: the metadata lacks a size.
        UnsupportedModelError: an architecture or rope scaling that is not supported.
    """
    kind = file.architecture
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has the architecture {kind!r}, which is not supported for GGUF files. "
            f"Supported: {', '.join(ARCHITECTURES)}."
        )
    if _EMBEDDING not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {_EMBEDDING}.")
    experts = file.number("expert_count", 0)
    heads, hidden = file.number("attention.head_count"), file.number("embedding_length")
    if heads < 1:
        raise CheckpointError(f"{file.path} has {kind}.attention.head_count={heads}.")
    head_size = file.number("attention.key_length", hidden // heads)
    if (rotated := file.number("rope.dimension_count", head_size)) != head_size:
        raise UnsupportedModelError(
            f"{file.path} rotates {rotated} of the {head_size} values of a head; heads that are "
            "rotated whole are supported."
        )
    config: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if kind == "llama" and experts else
                          ARCHITECTURES[kind]],
        "vocab_size": int(file.tensors[_EMBEDDING].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": file.number("feed_forward_length", 0 if experts else None),
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _OUTPUT not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }  # fmt: skip
    if kind == "gemma3":
        config |= _gemma3(file, config)
    else:
        config["rope_parameters"] = _rope(file)
    if experts:
        config |= _experts(file, kind)
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return config


def _dtype(file: GgufFile) -> str:
    """Return the dtype of activations: that of the matrices, bfloat16 if they are quantized."""
    kinds = {t.tensor_type.name for t in file.tensors.values() if len(t.shape) > 1}
    return _FLOATS[kinds.pop()] if len(kinds) == 1 and kinds <= _FLOATS.keys() else "bfloat16"


def _experts(file: GgufFile, kind: str) -> dict[str, Any]:
    if kind == "llama":
        return {
            "num_local_experts": file.number("expert_count"),
            "num_experts_per_tok": file.number("expert_used_count"),
            "sliding_window": None,
        }
    return {
        "num_experts": file.number("expert_count"),
        "num_experts_per_tok": file.number("expert_used_count"),
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_hidden_layers"] == _LARGEST_GEMMA3:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    else:
        scalar = config["head_dim"]
    slides = file.metadata.get("gemma3.attention.sliding_window_pattern")
    types = [f"{'sliding' if each else 'full'}_attention" for each in slides or []]
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": types or None,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": _rope(file, 1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
    }


def _rope(file: GgufFile, theta: float = 10_000.0) -> dict[str, Any]:
    """Return ``rope_parameters``."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": file.number("rope.freq_base", theta),
    }
    kind = file.get(f"{file.architecture}.rope.scaling.type", str, "none")
    # Before there were types, a linear scale stood alone.
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0))
    if kind == "none" and factor and factor != 1.0:
        kind = "linear"
    if ROPE_FACTORS in file.tensors:
        # Llama 3's: converters write the factors of all pairs in place of the parameters.
        factors = file.tensors[ROPE_FACTORS].data.tolist()
        length = file.number("context_length")
        return {
            **rope,
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.number("rope.scaling.original_context_length")
        return {
            **rope,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    if kind != "none":
        raise UnsupportedModelError(
            f"{file.path} has {file.architecture}.rope.scaling.type={kind!r}, which is not "
            "supported. Supported: none, linear, yarn."
        )
    return rope
