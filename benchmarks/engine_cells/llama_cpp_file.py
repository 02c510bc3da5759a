"""Writes Llama models as GGUF files, which llama.cpp and opweave read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from opweave.ir.ops.low_bit import random_blocks

_FILE_TYPES = {
    torch.float32: LlamaFileType.ALL_F32,
    torch.bfloat16: LlamaFileType.MOSTLY_BF16,
}
_FILE_NAMES = {"q4_0": "Q4_0", "q4_k": "Q4_K_M"}


def write_gguf(path: Path, model: Any) -> Path:
    """Write a ``LlamaForCausalLM``: matrices in its dtype, norms in float32, and no tokenizer.

    Args:
        path: where to.
        model: in float32 or bfloat16.
    """
    config = model.config
    writer = _writer(path, config, _FILE_TYPES[model.dtype])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # a tied matrix once
        tensor, part = parameter.detach(), name.split(".")[-2]
        if part in heads:
            tensor = _as_pairs(tensor, heads[part])
        _add(writer, names.get_name(name, (".weight", ".bias")), tensor)
    return _finished(writer, path, config)


def write_random_blocks(path: Path, config: Any, format: str) -> Path:
    """Write a file with random quantized weights.

    The table of a tied embedding has the format q6_k, as in the files that llama.cpp quantizes.

    Args:
        path: where to.
        config: a ``LlamaConfig``.
        format: of the matrices, such as ``"q4_0"``.
    """
    writer = _writer(path, config, LlamaFileType[f"MOSTLY_{_FILE_NAMES[format]}"])
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        theirs = names.get_name(name, (".weight", ".bias"))
        if parameter.dim() == 1:
            _add(writer, theirs, torch.ones(parameter.shape))
            continue
        own = "q6_k" if "embed_tokens" in name else format
        blocks = random_blocks(*parameter.shape, own).numpy()
        writer.add_tensor(theirs, blocks, raw_dtype=GGMLQuantizationType[own.upper()])
    return _finished(writer, path, config)


def _writer(path: Path, config: Any, kind: LlamaFileType) -> GGUFWriter:
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[MODEL_ARCH.LLAMA])
    _add_sizes(writer, config)
    writer.add_file_type(kind)
    writer.add_tokenizer_model("none")  # tokens are numbers; how many, the vocabulary's size says
    return writer


def _finished(writer: GGUFWriter, path: Path, config: Any) -> Path:
    if config.rope_parameters["rope_type"] != "default":
        frequencies = TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]
        divisors = _rope_divisors(config, LlamaRotaryEmbedding(config))
        _add(writer, f"{frequencies}.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.dtype is torch.bfloat16 and tensor.dim() > 1:
        raw = tensor.contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().numpy())


def _as_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows of each head in another order: what is rotated together, side by side.

    transformers rotates rows i and i + half the head's; llama.cpp rotates neighbors.
    """
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _rope_divisors(config: Any, rotary: Any) -> Tensor:
    """Return by what llama.cpp divides each rotary frequency, ``(head_dim / 2,)``."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    plain: Tensor = config.rope_parameters["rope_theta"] ** -exponents
    return plain / rotary.inv_freq
