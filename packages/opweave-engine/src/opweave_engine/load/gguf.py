"""GGUF files: configuration, tokenizer, chat template and weights of a model in one file."""

import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opweave.errors import shown
from opweave.ir.ops.low_bit import GGUF_BLOCKS
from opweave.layers.linear_methods import BlockMethod, LinearMethod
from opweave_engine.errors import CheckpointError, TokenizerError, require
from opweave_engine.models import CheckpointModel, UnsupportedModelError
from opweave_engine.models.weights import shown_name, shown_names

# The metadata keys of GGUF files: those that are read, change nothing, or are refused.
#
# Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp does with
# the keys of each architecture. Keys of an architecture are without its name.


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
    "general.name", "general.organization", "general.parameter_count", "general.quantized_by",
    "general.repo_url", "general.size_label", "general.tags", "general.url", "general.uuid",
    "general.version", "general.base_model.", "general.dataset.", "general.license.",
    "general.source.",
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
))  # fmt: skip
"""Keys that change what a model computes, unless the value is zero or what is computed anyway."""

# Sections whose unlisted keys are all treated as REFUSED.
STRICT = ("attention.", "rope.", "convnext.", "kda.", "posnet.", "shortconv.", "ssm.", "wkv.")


def refused_keys(
    architecture: str, metadata: Mapping[str, Any], implied: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a file with values that change what the model computes.

    Args:
        architecture: of the model.
        metadata: of the file.
        implied: the value that the model assumes, for keys whose neutral value is not zero.
    """
    accepted = READ.union(HARMLESS, READ_BY.get(architecture, ()))
    listed = REFUSED.union(*READ_BY.values())
    refused = {}
    for key, value in metadata.items():
        short = key.removeprefix(f"{architecture}.")
        is_strict = short != key and short.startswith(STRICT)
        if _is_listed(short, accepted) or not (is_strict or short in listed):
            continue
        if not _agrees(value, implied.get(short)):
            refused[key] = value
    return refused


def _shown(value: object) -> str:
    """Return a value as text for a message."""
    return shown(value[:20].tolist() if isinstance(value, np.ndarray) else value)


def unread_keys(architecture: str, metadata: Mapping[str, Any]) -> list[str]:
    """Return the keys of the file's and the model's own sections that are not on any list."""
    prefix = f"{architecture}."
    lists = READ.union(HARMLESS, REFUSED, *READ_BY.values())
    return [
        key
        for key in metadata
        if key.startswith(("general.", "tokenizer.", prefix))
        and not _is_listed(key.removeprefix(prefix), lists)
        and not key.removeprefix(prefix).startswith(STRICT)
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


# A GGUF file: metadata and tensors, mapped into memory.
#
# Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The checks are those of
# llama.cpp's reader.


_log = logging.getLogger(__name__)

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Types of values by their number in the file, as struct and numpy name them.
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")  # of a string, before its bytes
_FLOAT_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string"}


def is_gguf(path: Path) -> bool:
    """Return whether *path* is a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        kind: the library's ``GGMLQuantizationType``.
        shape: rows first, as in torch.
        data: the values, mapped into memory; the bytes of each row for other types than F16, F32
            and F64.
    """

    kind: Any
    shape: tuple[int, ...]
    data: NDArray[Any]


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file.

    Attributes:
        path: of the file.
        metadata: values by key: a list for an array of texts, a numpy array for one of numbers.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The architecture as the file names it: also the prefix of the keys of its sizes."""
        name: str = self.get("general.architecture", str)
        return name

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> Any:
        """Return the number *key* of the architecture, such as ``rope.freq_base``.

        Raises:
            CheckpointError: it is not a finite number, or not *positive*, or it is missing without
                a default.
        """
        name = f"{self.architecture}.{key}"
        value = self.get(name, float, default)
        if not math.isfinite(value) or (positive and value <= 0):
            kind = "positive and finite" if positive else "finite"
            raise CheckpointError(f"{self.path} has {name}={value}; it must be {kind}.")
        return value

    def size(self, key: str, default: int | None = None, *, per_layer: bool = False) -> int:
        """Return the integer *key* of the architecture, such as ``block_count``.

        Args:
            key: without the prefix.
            default: for files without the key.
            per_layer: whether the file may have an array with an integer for each layer.

        Raises:
            CheckpointError: it is not an integer, or it is missing without a default.
            UnsupportedModelError: layers have different integers.
        """
        name = f"{self.architecture}.{key}"
        values = self.metadata.get(name)
        if not per_layer or not isinstance(values, np.ndarray):
            size: int = self.get(name, int, default)
            return size
        layers = self.size("block_count")
        if values.dtype.kind not in "iu" or len(values) != layers or not layers:
            raise CheckpointError(
                f"{self.path} has an array {name} of {len(values)} values of type {values.dtype}; "
                f"it must have an integer for each of the {layers} layers."
            )
        if (values != values[0]).any():
            raise UnsupportedModelError(
                f"{self.path} has {name} with different values for different layers, from "
                f"{values.min()} to {values.max()}, which is not supported."
            )
        return int(values[0])

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of *key*, which must have the type *kind*; an integer is a float, too.

        Raises:
            CheckpointError: it has another type, or it is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        kinds = int | float if kind is float else kind
        if not isinstance(value, kinds) or isinstance(value, bool):
            problem = f"has {key}={_shown(value)}" if value is not None else f"has no {key}"
            raise CheckpointError(f"{self.path} {problem}; it must be {_TYPE_NAMES[kind]}.")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors; a file that did not change is read once.

    Raises:
        CheckpointError: the file is damaged, cut short, or one of several parts.
        MissingDependencyError: the library ``gguf`` is not installed.
    """
    require("gguf", "gguf")
    state = path.stat()
    return _read(path.resolve(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(path: Path, changed: int, size: int) -> GgufFile:
    try:
        file = _contents(path)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is damaged, cut short, or not a GGUF file ({why}). Download or copy it again."
        ) from error
    if (parts := file.get("split.count", int, 1)) > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts of a model, which are not supported. Merge them "
            "with: llama-gguf-split --merge."
        )
    if unread := unread_keys(file.architecture, file.metadata):
        _log.warning(
            "%s: these keys are not supported and are ignored, although they may change what the "
            "model computes: %s",
            path, shown_names(unread),
        )  # fmt: skip
    return file


def _contents(path: Path) -> GgufFile:
    """Read the file.

    Raises:
        ValueError: it is not valid.
        CheckpointError: it is of a kind that is not supported.
    """
    cursor = _Cursor(np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray))
    if bytes(cursor.numbers("B", len(_MAGIC))) != _MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is big-endian, which is not supported. Convert it with: "
            f"gguf-convert-endian {path} little."
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} has version {version} of the format. Supported: 2, 3. Convert the model again."
        )
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has the key {key!r} twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={str(alignment)[:80]} is not a power of two")
    return GgufFile(path, metadata, _tensors(cursor, tensor_count, alignment))


class _Cursor:
    """Reads values one after the other, and none past the end of the file.

    Attributes:
        data: the bytes of the file.
        at: the position of the next byte.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.at = data, 0
        self._bytes = data.data

    def numbers(self, form: str, count: int) -> NDArray[Any]:
        """Return an array that is mapped into memory."""
        dtype = np.dtype(form).newbyteorder("<")
        end = self.at + count * dtype.itemsize
        if end > len(self.data):
            raise ValueError(f"a value at byte {self.at} is not complete")
        values = self.data[self.at : end].view(dtype)
        self.at = end
        return values

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0].item()

    def texts(self, count: int) -> list[str]:
        at, end, source, texts = self.at, len(self.data), self._bytes, []
        if count * _LENGTH.size > end - at:
            raise ValueError(f"a value at byte {at} is not complete")
        for _ in range(count):
            start = at + _LENGTH.size
            if start > end or (at := start + _LENGTH.unpack_from(source, at)[0]) > end:
                raise ValueError(f"a value at byte {start} is not complete")
            texts.append(str(source[start:at], "utf-8"))
        self.at = at
        return texts

    def text(self) -> str:
        return self.texts(1)[0]

    def value(self, key: str) -> Any:
        kind = self.number("I")
        is_array = kind == _ARRAY
        kind, count = (self.number("I"), self.number("Q")) if is_array else (kind, 1)
        if kind == _STRING:
            return self.texts(count) if is_array else self.text()
        if kind not in _NUMBER_FORMATS:
            subject = "an array of type" if is_array else "the type"
            raise ValueError(f"{key!r} has {subject} {kind}, which is unknown or not supported")
        values = self.numbers(_NUMBER_FORMATS[kind], count)
        if kind == _BOOL:
            values = values != 0  # any other byte is true
        return values if is_array else values[0].item()


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Read the table of tensors, which lie in its order, each at the next aligned position."""
    gguf = require("gguf", "gguf")
    places: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}
    end = 0
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.number("I")
        if name in places:
            raise ValueError(f"it has the tensor {name!r} twice")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(cursor.numbers("Q", dimensions).tolist()))
        number, offset = cursor.number("I"), cursor.number("Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"the tensor {name!r} has the unknown type {number}") from None
        values, size = gguf.GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % values:
            raise ValueError(
                f"rows of {shape[-1]} values in {name!r} are not blocks of {kind.name}"
            )
        start = -(-end // alignment) * alignment
        if offset != start:
            raise ValueError(
                f"the tensor {name!r} is at byte {offset} of the data, but must be at {start}: "
                "where the one before it ends, aligned"
            )
        end = start + math.prod(shape) // values * size
        places[name] = (kind, shape, start, end)
    begin = -(-cursor.at // alignment) * alignment
    if begin + end > len(cursor.data) and places:
        raise ValueError(f"its tensors end at byte {begin + end}, but it has {len(cursor.data)}")
    tensors = {}
    for name, (kind, shape, start, end) in places.items():
        data = cursor.data[begin + start : begin + end]
        if kind.name in _FLOAT_DTYPES:
            data = data.view(_FLOAT_DTYPES[kind.name]).reshape(shape)
        elif data.size:
            data = data.reshape(*shape[:-1], -1)
        tensors[name] = GgufTensor(kind, shape, data)
    return tensors


# Builds ``config.json`` from a GGUF file's metadata.
#
# Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what
# llama.cpp computes from them.


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_LARGEST_GEMMA3 = 62  # layers of Gemma 3 27B, whose scores have a scale of their own
_EMBEDDING, _OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
        config["num_experts_per_tok"] = file.size("expert_used_count")
        config |= (
            {"num_local_experts": experts, "sliding_window": None}
            if kind == "llama"
            else {
                "num_experts": experts,
                "moe_intermediate_size": file.size("expert_feed_forward_length"),
                "norm_topk_prob": True,
            }
        )
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
    return _TORCH_DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    layers, scalar = config["num_hidden_layers"], config["head_dim"]
    if layers == _LARGEST_GEMMA3:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    window = file.size("attention.sliding_window", 0)
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern")
    types = None
    if isinstance(pattern, np.ndarray) and window:
        types = [f"{'sliding' if slides else 'full'}_attention" for slides in pattern.tolist()]
        period = 6
    else:
        # Without a window, every layer has full attention; with one, period 0 means none has.
        period = file.size("attention.sliding_window_pattern", 6) or layers + 1 if window else 1
    magnitude = file.number("rope.scaling.attn_factor", 1.0, positive=True)
    theta = file.number("rope.freq_base_swa", 10_000.0)
    sliding: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if magnitude != 1:
        sliding = _stretched(file, sliding, np.ones(config["head_dim"] // 2), magnitude)
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or 1,  # must be positive; without a window, no layer uses it
        "layer_types": types,
        "sliding_window_pattern": period,
        "rope_parameters": {"full_attention": _rope(file, config), "sliding_attention": sliding},
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
    }


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
    # Older files have rope.scale_linear and no rope.scaling.type.
    scale = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0)) or 1.0
    if scale < 0:
        raise CheckpointError(
            f"{file.path} has {file.architecture}.rope.scaling.factor={scale}; it must be positive."
        )
    magnitude = file.number("rope.scaling.attn_factor", 1.0, positive=True)
    factors = _factors(file, config["head_dim"])
    if kind == "yarn":
        if factors is not None:
            raise UnsupportedModelError(
                f"{file.path} has both the tensor {ROPE_FACTORS} and "
                f"{file.architecture}.rope.scaling.type='yarn', which is not supported."
            )
        return rope | _yarn(file, scale, magnitude)
    if keys := [key for key in file.metadata if key.startswith(f"{file.architecture}.{_YARN}")]:
        raise UnsupportedModelError(
            f"{file.path} has {shown_names(keys)} with rope.scaling.type={kind!r}, which is not "
            "supported. They belong to the type 'yarn'."
        )
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
    # llama.cpp and transformers compute this magnitude if the file has none.
    default = 0.1 * math.log(max(factor, 1.0)) + 1
    attention = file.number(f"{_YARN}attn_factor", default)
    is_default = math.isclose(attention, default, rel_tol=1e-4)
    # A negative factor stands for the default, which is 1.
    if (extrapolated >= 0 and extrapolated != 1) or not is_default:
        raise UnsupportedModelError(
            f"{file.path} has {file.architecture}.{_YARN}ext_factor={extrapolated:g} and "
            f"yarn_attn_factor={attention:g}; supported are 1 and {default:g}, which llama.cpp "
            "computes with."
        )
    original = file.size("rope.scaling.original_context_length", 0) or file.size("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": file.number(f"{_YARN}beta_fast", 32.0, positive=True),
        "beta_slow": file.number(f"{_YARN}beta_slow", 1.0, positive=True),
        "attention_factor": default * magnitude,
    }


# The tensors of a GGUF file under the names that Hugging Face's checkpoints give them.


_UNQUANTIZED_TYPES = ("F32", "F16", "BF16", "F64")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the model is: a tensor of the file, and the expert's index in it."""

    name: str
    expert: int | None = None


class GgufTensors:
    """The weights of a file: a :class:`~opweave_engine.load.checkpoint.QuantizedSource`.

    Args:
        contents: the file.
        model: the model that it is for, without memory for its weights.

    Raises:
        CheckpointError: a tensor has a name that the model does not know.
    """

    def __init__(self, contents: GgufFile, model: CheckpointModel) -> None:
        self._contents = contents
        self._places = dict(self._find(model))
        used = {place.name for place in self._places.values()}
        factors = {ROPE_FACTORS} if contents.architecture == "llama" else set()
        if unknown := sorted(contents.tensors.keys() - used - factors):
            raise CheckpointError(
                f"{contents.path} has tensors that {type(model).__name__} does not use: "
                f"{shown_names(unknown)}."
            )
        self._check_kinds()
        self.methods = dict(self._methods())
        self._log_formats()

    @property
    def file(self) -> Path:
        return self._contents.path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: self._entry(name).shape[place.expert is not None :]
            for name, place in self._places.items()
        }

    def tensor(self, name: str) -> Tensor:
        entry, data = self._entry(name), self._data(name)
        kind = entry.kind.name
        if kind not in _UNQUANTIZED_TYPES or kind == "BF16":
            data = require("gguf.quants").dequantize(data, entry.kind)
        values = torch.from_numpy(np.array(data))
        if kind == "BF16":
            values = values.bfloat16()
        # GGUF stores Gemma's norm weights as 1 + w; the model expects w.
        is_gemma = self._contents.architecture == "gemma3"
        return values - 1 if is_gemma and name.endswith("norm.weight") else values

    def parameters(self, module: str, method: LinearMethod) -> dict[str, Tensor]:
        return {"weight": torch.from_numpy(np.array(self._data(f"{module}.weight")))}

    def _entry(self, name: str) -> GgufTensor:
        return self._contents.tensors[self._places[name].name]

    def _data(self, name: str) -> Any:
        """Return the values of a tensor as the file has them, rows in the model's order."""
        entry, place = self._entry(name), self._places[name]
        data = entry.data if place.expert is None else entry.data[place.expert]
        # llama.cpp's converter interleaves Llama's query and key rows.
        is_query, is_key = ("attn_q." in place.name), ("attn_k." in place.name)
        if self._contents.architecture == "llama" and (is_query or is_key):
            heads = self._contents.size("attention.head_count", per_layer=True)
            if is_key:
                heads = self._contents.size("attention.head_count_kv", heads, per_layer=True)
            return _deinterleaved(data, heads)
        return data

    def _find(self, model: CheckpointModel) -> Iterator[tuple[str, _Place]]:
        gguf, tensors = require("gguf", "gguf"), self._contents.tensors
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(
            kinds[self._contents.architecture], self._contents.size("block_count")
        )
        for name in model.places():
            match = _EXPERT.search(name)
            theirs = names.get_name(_EXPERT.sub(".experts.", name), (".weight", ".bias"))
            expert = None if match is None else int(match[1])
            if theirs in tensors:
                yield name, _Place(theirs, expert)
            elif theirs is not None and expert is not None:  # files of early 2024
                single = theirs.replace("_exps.", f".{expert}.")
                if single in tensors:
                    yield name, _Place(single)

    def _check_kinds(self) -> None:
        """Raise CheckpointError for a type that is neither floating-point nor dequantized."""
        gguf, quants = require("gguf", "gguf"), require("gguf.quants")
        names = {self._contents.tensors[p.name].kind: p.name for p in self._places.values()}
        for kind in sorted(kind for kind in names if kind.name not in _UNQUANTIZED_TYPES):
            try:
                quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.file} has the tensor {names[kind]} of type {kind.name}, which is not "
                    "supported for weights."
                ) from error

    def _methods(self) -> Iterator[tuple[str, LinearMethod]]:
        for name in self._places:
            format = self._entry(name).kind.name.lower()
            if name.endswith(".weight") and format in GGUF_BLOCKS:
                yield name.removesuffix(".weight"), BlockMethod(format)

    def _log_formats(self) -> None:
        kinds = Counter(self._entry(name).kind.name for name in self._places)
        readable = {*_UNQUANTIZED_TYPES, *map(str.upper, GGUF_BLOCKS)}
        if others := {k: n for k, n in kinds.items() if k not in readable}:
            _log.warning(
                "%s: %s are dequantized while they are loaded: no kernel reads their format",
                self.file, ", ".join(f"{n} tensors of {k}" for k, n in others.items()),
            )  # fmt: skip


def _deinterleaved(data: Any, heads: int) -> Any:
    """Undo llama.cpp's interleaving of query or key rows.

    llama.cpp rotates adjacent pairs of values, so its converter interleaves the halves of a head.
    """
    pairs = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


# How text is split before BPE, by ``tokenizer.ggml.pre``.
#
# Source: the ``pre_tokenizer`` in the ``tokenizer.json`` of the models that the names stand for.


_PRE = "tokenizer.ggml.pre"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenization:
    """Normalization and pre-tokenization of a BPE tokenizer.

    Attributes:
        steps: pre-tokenizers, in the format of ``tokenizer.json``.
        normalizer: the normalizer, in the same format; None: no normalization.
        ignores_merges: whether a word that is in the vocabulary skips the merges.
        adds_bos: whether to prepend the BOS token if the file has no ``add_bos_token``.
    """

    steps: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


def _bytes(*, splits: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits
    }  # fmt: skip


def _regex(*patterns: str) -> list[dict[str, Any]]:
    """Return the steps that isolate what each of *patterns* matches, one after the other."""
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return [*steps, _bytes(splits=False)]


_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = PreTokenization([_bytes(splits=True)])
_LLAMA3 = PreTokenization(_regex(_WORDS + r"|\p{N}{1,3}" + _REST), None, True, True)
_SMOLLM = PreTokenization([_DIGITS, _bytes(splits=True)])
_QWEN2 = PreTokenization(_regex(_WORDS + r"|\p{N}" + _REST), {"type": "NFC"})
# Source: llama.cpp's LLAMA_VOCAB_PRE_TYPE_DEFAULT, for files that name none or "default".
_DEFAULT = PreTokenization(
    _regex(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)
_SPLITS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "megrez"), _QWEN2),
    "deepseek-r1-qwen": replace(_QWEN2, adds_bos=True),
    "tekken": PreTokenization(_regex(_CASED), None, True, True),
}


def pre_tokenization_of(file: GgufFile) -> PreTokenization:
    """Return how the tokenizer of *file* splits text.

    Raises:
        TokenizerError: it names a kind that is not supported.
    """
    kind = file.get(_PRE, str, "default")
    if kind not in _SPLITS:
        raise TokenizerError(
            f"{file.path} has {_PRE}={kind!r}, which is not supported. Supported: "
            f"{', '.join(_SPLITS)}."
        )
    return _SPLITS[kind]


# Builds ``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF file's metadata.
#
# Source: the keys ``tokenizer.ggml.*`` of
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the splits that
# ``tokenizer.ggml.pre`` names are those of the models' published ``tokenizer.json``.


_MODEL, _TOKENS, _TYPES = (f"tokenizer.ggml.{key}" for key in ("model", "tokens", "token_type"))
_CONTROL, _USER_DEFINED = 3, 4  # of token_type
_SPACE = "▁"
# Control tokens that end an answer, which files do not always name as such.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Return the object of a ``tokenizer.json``.

    Raises:
        TokenizerError: the tokenizer is of a kind that is not supported, or incomplete.
    """
    kind = file.metadata.get(_MODEL)
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{file.path} has {_MODEL}={kind!r}, which is not supported. Supported: 'gpt2' (BPE of "
            "bytes), 'llama' (SentencePiece)."
        )
    pipeline = _byte_level(file) if kind == "gpt2" else _sentence_piece(file)
    return {
        "version": "1.0",
        "added_tokens": list(_added(file)),
        "post_processor": _post_processor(file),
        **pipeline,
    }


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the object of a ``tokenizer_config.json``, the chat templates included."""
    tokens = _tokens(file)
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _id(file, key)) is not None:
            config[f"{name}_token"] = tokens[token]
    template = file.metadata.get("tokenizer.chat_template")
    named = file.metadata.get("tokenizer.chat_templates")
    if template is not None and isinstance(named, list) and named:
        others = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in named}
        config["chat_template"] = {"default": template, **others}
    elif template is not None:
        config["chat_template"] = template
    return config


def end_tokens(file: GgufFile) -> list[int]:
    """Return the ids that end an answer."""
    tokens, ids = _tokens(file), {_id(file, key) for key in ("eos", "eot", "eom")}
    ids |= {i for i, kind in enumerate(_types(file)) if kind == _CONTROL and tokens[i] in _ENDS}
    return sorted(token for token in ids if token is not None)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get(_TOKENS)
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise TokenizerError(f"{file.path} has no list of strings {_TOKENS}.")
    return tokens


def _types(file: GgufFile) -> list[int]:
    """Return the type of each token; an empty list if the file does not say."""
    types = file.metadata.get(_TYPES)
    return [] if types is None else _numbers(file, _TYPES, "iu").tolist()


def _numbers(file: GgufFile, key: str, kinds: str) -> NDArray[Any]:
    """Return the array *key*, which has a number for each token.

    Args:
        file: with that key.
        key: of the metadata.
        kinds: of dtypes that the numbers may have, as numpy abbreviates them.
    """
    numbers, count = file.metadata.get(key), len(_tokens(file))
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind in kinds and len(numbers) == count:
        return numbers
    raise TokenizerError(f"{file.path} has no {key} with a number for each of the {count} tokens.")


def _id(file: GgufFile, kind: str) -> int | None:
    """Return the id of the *kind* of token, or None."""
    key, count = f"tokenizer.ggml.{kind}_token_id", len(_tokens(file))
    token = file.get(key, int, -1)
    # llama.cpp writes the largest number, or -1, for a token that does not exist.
    if token in (-1, 2**32 - 1):
        return None
    if not 0 <= token < count:
        raise TokenizerError(f"{file.path} has {key}={token}, but {count} tokens.")
    return int(token)


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    if not isinstance(value := file.metadata.get(key, default), int):
        raise TokenizerError(f"{file.path} has {key}={_shown(value)}; it must be a boolean.")
    return bool(value)


def _added(file: GgufFile) -> Iterator[dict[str, Any]]:
    types, is_gemma = _types(file), file.architecture.startswith("gemma")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    named = {_id(file, kind) for kind in ("bos", "eos", "unknown", "padding")}
    for token, text in enumerate(_tokens(file)):
        kind = types[token] if types else None
        if kind == _CONTROL or token in named:
            yield {"id": token, "content": text, **flags, "special": True}
        elif kind == _USER_DEFINED and (text.strip(" ") or not is_gemma):
            yield {"id": token, "content": text, **flags, "special": False}


def _post_processor(file: GgufFile) -> dict[str, Any] | None:
    """Return what adds the first and the last token, where the file asks for it."""
    default = file.metadata.get(_MODEL) == "llama" or pre_tokenization_of(file).adds_bos
    sequence: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for kind, place, absent in (("bos", 0, default), ("eos", 2, False)):
        token = _id(file, kind)
        if token is None or not _flag(file, f"add_{kind}_token", absent):
            continue
        text = _tokens(file)[token]
        sequence.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
        special[text] = {"id": text, "ids": [token], "tokens": [text]}
    if not special:
        return None
    return {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


def _byte_level(file: GgufFile) -> dict[str, Any]:
    """Return the parts of a BPE tokenizer of bytes."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise TokenizerError(f"{file.path} has no list tokenizer.ggml.merges.")
    splits = pre_tokenization_of(file)
    if splits is _DEFAULT:
        _log.warning(
            "%s does not name the model's pre-tokenizer (tokenizer.ggml.pre): text is split by "
            "llama.cpp's default rule, and tokens may differ from those of the model's training. "
            "Convert the model again with a current llama.cpp",
            file.path,
        )
    pairs = [merge.split(" ", 1) for merge in merges]
    if wrong := [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) < 2]:
        raise TokenizerError(f"{file.path} has the merge {wrong[0]!r}, which is not a pair.")
    return {
        "normalizer": splits.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits.steps},
        "decoder": {**_bytes(splits=True), "add_prefix_space": True},
        "model": _bpe(_tokens(file), pairs, ignore_merges=splits.ignores_merges),
    }


def _sentence_piece(file: GgufFile) -> dict[str, Any]:
    """Return the parts of a SentencePiece tokenizer, as BPE with a byte for unknown characters.

    The pair with the best score is merged first; the score is that of the result.
    """
    tokens: Sequence[str] = _tokens(file)
    scores = _numbers(file, "tokenizer.ggml.scores", "f").tolist()
    prefix = _flag(file, "add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    if file.architecture.startswith("gemma"):
        # Gemma's files have runs of spaces in place of marks, and the order of the merges is that
        # of the tokens, not of the scores.
        tokens = [text if text.strip(" ") else text.replace(" ", _SPACE) for text in tokens]
        scores = [-float(token) for token in range(len(tokens))]
    unknown = _id(file, "unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, replaced]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *end],
        },
        "model": {
            **_bpe(tokens, _merges(tokens, scores)),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    ids = {text: token for token, text in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for text, score in zip(tokens, scores, strict=True):
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(merges)]


def _bpe(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], *, ignore_merges: bool = False
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "ignore_merges": ignore_merges,
        "vocab": {text: token for token, text in enumerate(tokens)},
        "merges": merges,
    }


# The JSON files of a checkpoint directory that are built from a GGUF file's metadata.


# Names of sampling parameters in the file, and those in generation_config.json.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def _generation(file: GgufFile) -> dict[str, Any]:
    values = {ours: file.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    # The shortest decimal number that is the same float32: 0.6, not 0.6000000238.
    short = {k: float(str(np.float32(v))) if isinstance(v, float) else v for k, v in values.items()}
    sampling = {key: value for key, value in short.items() if value is not None}
    return {"eos_token_id": end_tokens(file), **sampling}


_JSON_FILES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": _generation,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}
_NO_VOCABULARY = ("none", "no_vocab")  # llama.cpp's names for files without a tokenizer


def has_json(file: GgufFile, name: str) -> bool:
    """Return whether *file* provides the JSON *name*; without a tokenizer, only config.json."""
    kind = file.get("tokenizer.ggml.model", str, "none")
    return name == "config.json" or (name in _JSON_FILES and kind not in _NO_VOCABULARY)


def json_of(file: GgufFile, name: str) -> dict[str, Any] | None:
    """Return the object of the JSON file *name*, or None if *file* does not provide it."""
    return _JSON_FILES[name](file) if has_json(file, name) else None
