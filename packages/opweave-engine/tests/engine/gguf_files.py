"""GGUF files of transformers' models: weights in any format, and the model with the same values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor

# Architecture of transformers -> of GGUF.
_KINDS = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def block_bytes(kind: Kind, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Return random blocks whose scales are small finite numbers, ``(rows, bytes)``."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    scales = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q3_K: (108,),
              Kind.Q2_K: (80, 82)}  # fmt: skip
    for at in scales[kind]:
        random = generator.uniform(0.5, 1.5, (rows, columns // values, 1)).astype(np.float16)
        blocks[..., at : at + 2] = (random / np.float16(4000)).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(
    path: Path,
    model: Any,
    kind_of: Callable[[str], Kind] = lambda _: Kind.F32,
    extra: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """Write *model*, and give it the values that its weights have in the file.

    Args:
        path: of the file.
        model: transformers'.
        kind_of: the format of the matrix of a name.
        extra: adds metadata, such as a tokenizer.
    """
    config = model.config
    kind = _KINDS[config.model_type]
    writer = GGUFWriter(path, kind)
    _add_sizes(writer, config)
    extra(writer)
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[kind], config.num_hidden_layers)
    for name, tensor in _tensors(model):
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        if "gemma" in kind and name.endswith("norm.weight"):
            writer.add_tensor(theirs, (tensor + 1).numpy())
        elif tensor.ndim == 1:
            data = _as_pairs(tensor, name, config) if kind == "llama" else tensor
            writer.add_tensor(theirs, np.ascontiguousarray(data.numpy()))
        else:
            matrix = _as_pairs(tensor, name, config) if kind == "llama" else tensor
            data, values = _encoded(matrix, kind_of(name))
            # The library takes the shape of floating-point data, and bytes of the other formats.
            writer.add_tensor(theirs, data, raw_dtype=kind_of(name))
            tensor.copy_(_from_pairs(values, name, config) if kind == "llama" else values)
    if config.model_type != "gemma3_text" and config.rope_parameters["rope_type"] == "llama3":
        exponents = torch.arange(0, _head_dim(config), 2) / _head_dim(config)
        plain = config.rope_parameters["rope_theta"] ** -exponents
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add the key, or give it another value; None removes it."""
    values = writer.kv_data[0]
    values.pop(key, None)
    if value is None:
        return
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds = {bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32}
        writer.add_key_value(key, value, kinds[type(value)])


def _encoded(matrix: Tensor, kind: Kind) -> tuple[NDArray[Any], Tensor]:
    """Return the bytes of *matrix*, and the values that they stand for."""
    flat = matrix.reshape(-1, matrix.shape[-1])
    if kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        data = block_bytes(kind, *flat.shape, seed=flat.shape[0] + kind)
    elif kind in (Kind.F32, Kind.F16):
        data = flat.numpy().astype(np.float32 if kind == Kind.F32 else np.float16)
    else:
        data = quantize(flat.numpy(), kind)
    values = torch.from_numpy(dequantize(data, kind).astype(np.float32)).reshape(matrix.shape)
    return data.reshape(*matrix.shape[:-1], -1), values


def _tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors under names that the library knows: experts in three matrices."""
    found = []
    for name, parameter in model.named_parameters():
        tensor = parameter.data
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            prefix = name.removesuffix("gate_up_proj")
            found += [(f"{prefix}gate_proj.weight", gate), (f"{prefix}up_proj.weight", up)]
        elif name.endswith("experts.down_proj"):
            found.append((f"{name}.weight", tensor))
        else:
            found.append((name, tensor))
    return found


def _head_dim(config: Any) -> int:
    shared: int = config.hidden_size // config.num_attention_heads
    return getattr(config, "head_dim", None) or shared


def _heads(name: str, config: Any) -> int | None:
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else None


def _as_pairs(tensor: Tensor, name: str, config: Any) -> Tensor:
    heads = _heads(name, config)
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _from_pairs(tensor: Tensor, name: str, config: Any) -> Tensor:
    heads = _heads(name, config)
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        kinds = config.layer_types
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        rope = rope["full_attention"]
    if experts := getattr(config, "num_local_experts", getattr(config, "num_experts", None)):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if config.model_type == "qwen3_moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
