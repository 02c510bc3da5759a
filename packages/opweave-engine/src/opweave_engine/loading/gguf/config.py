"""The ``config.json`` that a GGUF file's metadata stands for.

Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp
computes from them.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.gguf.file import GgufFile
from opweave_engine.loading.gguf.keys import refused_keys
from opweave_engine.models import UnsupportedModelError
from opweave_engine.models.weights import shown_name

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
_YARN = "rope.scaling.yarn_"


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the object of a ``config.json``.

    Raises:
        CheckpointError: the metadata lacks a size, or the tensors have other sizes.
        UnsupportedModelError: an architecture, rope scaling or another key that is not supported.
    """
    kind = file.architecture
    if (content := file.get("general.type", str, "model")) != "model":
        raise UnsupportedModelError(
            f"{file.path} has general.type={content!r}: it is not a model. Give the model's file."
        )
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has the architecture {kind!r}, which is not supported for GGUF files. "
            f"Supported: {', '.join(ARCHITECTURES)}."
        )
    experts = file.size("expert_count", 0) if kind in ("llama", "qwen3moe") else 0
    heads, hidden = file.size("attention.head_count", per_layer=True), file.size("embedding_length")
    if heads < 1:
        raise CheckpointError(f"{file.path} has {kind}.attention.head_count={heads}.")
    head_size = file.size("attention.key_length", hidden // heads)
    if head_size < 1:
        raise CheckpointError(f"{file.path} has heads of {head_size} values.")
    if (rotated := file.size("rope.dimension_count", head_size)) != head_size:
        raise UnsupportedModelError(
            f"{file.path} rotates {rotated} of the {head_size} values of a head; heads that are "
            "rotated whole are supported."
        )
    config: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if kind == "llama" and experts else
                          ARCHITECTURES[kind]],
        "vocab_size": _shape(file, _EMBEDDING)[0],
        "hidden_size": hidden,
        "intermediate_size": file.size(
            "feed_forward_length", 0 if experts else None, per_layer=True
        ),
        "num_hidden_layers": file.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("attention.head_count_kv", heads, per_layer=True),
        "head_dim": head_size,
        "max_position_embeddings": file.size("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _OUTPUT not in file.tensors,
        "dtype": _dtype(file),
        **{
            f"{name}_token_id": file.get(key, int)
            for name in ("bos", "eos")
            if (key := f"tokenizer.ggml.{name}_token_id") in file.metadata
        },
    }  # fmt: skip
    if experts:
        config |= _experts(file, kind)
    _check_sizes(file, config, experts)
    if kind == "gemma3":
        config |= _gemma3(file, config)
    else:
        config["rope_parameters"] = _rope(file, config)
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    _check_keys(file, config)
    return config


def _check_keys(file: GgufFile, config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if a key changes what the model computes and is not read."""
    length, head_size = config["max_position_embeddings"], config["head_dim"]
    sliding = file.metadata.get(f"{file.architecture}.attention.sliding_window", 0)
    implied = {
        "general.quantization_version": 2,
        "attention.causal": True,
        "attention.key_length_swa": head_size,
        "attention.scale": config.get("query_pre_attn_scalar", head_size) ** -0.5,
        # A window that is as long as the context masks nothing.
        "attention.sliding_window": max(length, sliding) if isinstance(sliding, int) else length,
        "attention.value_length": head_size,
        "attention.value_length_swa": head_size,
        "embedding_length_out": config["hidden_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 1,  # softmax
        "expert_weights_norm": True,
        "expert_weights_scale": 1,
        "logit_scale": 1,
        "residual_scale": 1,
        "rope.dimension_count_swa": head_size,
        "rope.freq_base_swa": file.number("rope.freq_base", 10_000.0),
    }
    if refused := refused_keys(file.architecture, file.metadata, implied):
        values = ", ".join(
            f"{shown_name(key)}={' '.join(str(value).split())[:80]}"
            for key, value in islice(refused.items(), 8)
        )
        raise UnsupportedModelError(
            f"{file.path} has metadata that changes what the model computes and is not supported: "
            f"{values}."
        )


def _check_sizes(file: GgufFile, config: dict[str, Any], experts: int) -> None:
    """Raise CheckpointError if the metadata has other sizes than the tensors of the first layer."""
    head_size = config["head_dim"]
    sizes = [
        (_EMBEDDING, 1, "embedding_length", config["hidden_size"]),
        ("blk.0.attn_q.weight", 0, "attention.head_count x key_length",
         config["num_attention_heads"] * head_size),
        ("blk.0.attn_k.weight", 0, "attention.head_count_kv x key_length",
         config["num_key_value_heads"] * head_size),
    ]  # fmt: skip
    last = f"blk.0.ffn_down.{experts - 1}.weight"
    if not experts:
        sizes.append(
            ("blk.0.ffn_down.weight", 1, "feed_forward_length", config["intermediate_size"])
        )
    elif last not in file.tensors:  # files of early 2024 have a tensor for each expert
        sizes.append(("blk.0.ffn_down_exps.weight", 0, "expert_count", experts))
    for name, dimension, key, size in sizes:
        if (shape := _shape(file, name))[dimension] != size:
            raise CheckpointError(
                f"{file.path} has {file.architecture}.{key}={size}, but the tensor {name} has the "
                f"shape {list(shape)}."
            )


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    """Return the shape of a matrix.

    Raises:
        CheckpointError: the tensor is missing, or not a matrix or several.
    """
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}.")
    shape = file.tensors[name].shape
    if len(shape) < 2:
        raise CheckpointError(f"{file.path} has the tensor {name} of shape {list(shape)}.")
    return shape


def _dtype(file: GgufFile) -> str:
    """Return the dtype of activations: that of the matrices, bfloat16 if they are quantized."""
    kinds = {t.kind.name for t in file.tensors.values() if len(t.shape) > 1}
    return _FLOATS[kinds.pop()] if len(kinds) == 1 and kinds <= _FLOATS.keys() else "bfloat16"


def _experts(file: GgufFile, kind: str) -> dict[str, Any]:
    used = file.size("expert_used_count")
    if kind == "llama":
        return {
            "num_local_experts": file.size("expert_count"),
            "num_experts_per_tok": used,
            "sliding_window": None,
        }
    return {
        "num_experts": file.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": file.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    if layers == _LARGEST_GEMMA3:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    else:
        scalar = config["head_dim"]
    window = file.size("attention.sliding_window", 0)
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern")
    types = None
    if isinstance(pattern, np.ndarray) and window:
        types = [f"{'sliding' if slides else 'full'}_attention" for slides in pattern.tolist()]
        period = 6
    else:
        # Without a window, all layers see everything. Where the period is 0, none does.
        period = file.size("attention.sliding_window_pattern", 6) or layers + 1 if window else 1
    magnitude = _positive(file, "rope.scaling.attn_factor", 1.0)
    sliding: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": file.number("rope.freq_base_swa", 10_000.0),
    }
    if magnitude != 1:
        sliding = _stretched(file, sliding, np.ones(config["head_dim"] // 2), magnitude)
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or 1,  # of no layer, where the file has no window
        "layer_types": types,
        "sliding_window_pattern": period,
        "rope_parameters": {"full_attention": _rope(file, config), "sliding_attention": sliding},
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
    }


def _positive(file: GgufFile, key: str, default: float) -> float:
    value: float = file.number(key, default)
    if value <= 0:
        raise CheckpointError(
            f"{file.path} has {file.architecture}.{key}={value}; it must be positive."
        )
    return value


def _stretched(
    file: GgufFile, plain: dict[str, Any], divisors: Any, magnitude: float
) -> dict[str, Any]:
    """Return ``rope_parameters`` with a divisor for the frequency of each pair."""
    return {
        **plain,
        "rope_type": "longrope",
        "short_factor": divisors.tolist(),
        "long_factor": divisors.tolist(),
        "attention_factor": magnitude,
        "factor": 1.0,
        "original_max_position_embeddings": file.size("context_length"),
    }


def _rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of layers without a window.

    llama.cpp takes a scaling without a type as linear, and one without a factor as none.
    """
    rope = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", 10_000.0)}
    kind = file.get(f"{file.architecture}.rope.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} has {file.architecture}.rope.scaling.type={kind!r}, which is not "
            "supported. Supported: none, linear, yarn."
        )
    # Before there were types, a linear scale stood alone.
    scale = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0)) or 1.0
    if scale < 0:
        raise CheckpointError(
            f"{file.path} has {file.architecture}.rope.scaling.factor={scale}; it must be positive."
        )
    magnitude = _positive(file, "rope.scaling.attn_factor", 1.0)
    factors = _factors(file, config["head_dim"])
    if kind == "yarn":
        if factors is not None:
            raise UnsupportedModelError(
                f"{file.path} has both the tensor {ROPE_FACTORS} and "
                f"{file.architecture}.rope.scaling.type='yarn', which is not supported."
            )
        return rope | _yarn(file, scale, magnitude)
    _refuse_yarn(file, kind)
    if kind == "none":
        scale = 1.0
    if factors is None and magnitude == 1:
        return rope if scale == 1 else {**rope, "rope_type": "linear", "factor": scale}
    ones = np.ones(config["head_dim"] // 2)
    return _stretched(file, rope, scale * (ones if factors is None else factors), magnitude)


def _factors(file: GgufFile, head_size: int) -> Any:
    """Return the divisors of frequencies that Llama 3's converter writes, or None."""
    if ROPE_FACTORS not in file.tensors or file.architecture != "llama":
        return None
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind.name != "F32" or tensor.shape != (head_size // 2,):
        raise CheckpointError(
            f"{file.path} has the tensor {ROPE_FACTORS} of type {tensor.kind.name} and shape "
            f"{list(tensor.shape)}; it must be F32 with {head_size // 2} values."
        )
    return tensor.data.astype(np.float64)


def _yarn(file: GgufFile, factor: float, magnitude: float) -> dict[str, Any]:
    extrapolated = file.number(f"{_YARN}ext_factor", 1.0)
    # The magnitude that llama.cpp and transformers take if the file has none.
    default = 0.1 * math.log(max(factor, 1.0)) + 1
    attention = file.number(f"{_YARN}attn_factor", default)
    # A negative factor stands for the default, which is 1.
    if (extrapolated >= 0 and extrapolated != 1) or not math.isclose(
        attention, default, rel_tol=1e-4
    ):
        raise UnsupportedModelError(
            f"{file.path} has {file.architecture}.{_YARN}ext_factor={extrapolated:g} and "
            f"yarn_attn_factor={attention:g}; supported are 1 and {default:g}, which llama.cpp "
            "computes with."
        )
    original = "rope.scaling.original_context_length"
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.size(original, 0) or file.size("context_length"),
        "beta_fast": _positive(file, f"{_YARN}beta_fast", 32.0),
        "beta_slow": _positive(file, f"{_YARN}beta_slow", 1.0),
        "attention_factor": default * magnitude,
    }


def _refuse_yarn(file: GgufFile, kind: str) -> None:
    keys = [key for key in file.metadata if key.startswith(f"{file.architecture}.{_YARN}")]
    if keys:
        raise UnsupportedModelError(
            f"{file.path} has {', '.join(map(shown_name, keys[:8]))} with "
            f"rope.scaling.type={kind!r}, which is not supported. They belong to the type 'yarn'."
        )
