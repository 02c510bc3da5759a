"""Checkpoints of bitsandbytes: 4-bit nf4 and fp4 (arXiv:2305.14314), and LLM.int8().

A matrix of 4 bits has tensors ``weight`` (two codes per byte, the first in the high bits),
``weight.absmax`` (the factor of each block), ``weight.quant_map`` (the value of each code) and
``weight.quant_state.*`` (JSON). With double quantization, the factors are codes, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Tensors,
    misfit,
    require_shape,
    rows8,
)
from opweave_engine.loading.quantized.strict import StrictConfig
from opweave_engine.models import UnsupportedModelError
from opweave_engine.models.weights import shown_name

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_FACTORS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
_LARGEST = 127.0  # of int8
_ORDERS = ("row", "col32", "col_turing", "col_ampere")  # by weight_format


class BitsAndBytes:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = (*_STATES, "SCB")
    leaves = ("weight", *_FACTORS, *_STATES, "SCB", "weight_format")
    values_needed = (*_STATES, "weight_format")

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = StrictConfig(config, "bitsandbytes")
        read.one_of("bnb_4bit_quant_type", "nf4", "fp4", default="nf4")
        read.one_of("bnb_4bit_quant_storage", "uint8", default="uint8")
        read.allow(
            *("quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
            *("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
            *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight"),
            "llm_int8_enable_fp32_cpu_offload",
        )
        read.finish()
        self.notes: list[str] = []
        if config.get("load_in_8bit"):
            self.notes.append("activations stay in the model's dtype, LLM.int8() quantizes them")

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        state = next((tensors[leaf] for leaf in _STATES if leaf in tensors), None)
        if state is not None:
            return _of_4_bits(module, tensors, _read(module, state))
        _require_rows(module, tensors.get("weight_format"))
        weight = require_shape(module, tensors, "weight", (torch.int8,), None, None)
        scale = require_shape(module, tensors, "SCB", FLOATS, weight.shape[0])
        return rows8(module, tensors, weight, scale.float() / _LARGEST)


def _require_rows(module: str, order: Tensor | None) -> None:
    """Raise UnsupportedModelError unless an int8 matrix is stored row by row."""
    values = [0] if order is None else order.flatten().tolist()
    if values != [0]:
        number = values[0] if len(values) == 1 and 0 <= values[0] < len(_ORDERS) else None
        name = "" if number is None else f" ({_ORDERS[number]})"
        raise UnsupportedModelError(
            f"{shown_name(module)}.weight_format is {values[0] if values else values}{name}, an "
            "order of the int8 weights that is not supported. Supported: 0 (row). Save the "
            "checkpoint again with bitsandbytes 0.45 or newer."
        )


def _of_4_bits(module: str, tensors: Tensors, state: Mapping[str, Any]) -> QuantizedMatrix:
    rows, columns = state["shape"]
    weight, count = tensors.get("weight"), rows * columns
    if weight is None or weight.dtype is not torch.uint8 or weight.numel() != -(-count // 2):
        wanted = f"uint8, {-(-count // 2)} bytes for ({rows}, {columns})"
        raise misfit(module, "weight", torch.empty(0) if weight is None else weight, wanted)
    values = require_shape(module, tensors, "weight.quant_map", (torch.float32,), 16)
    blocks = -(-count // state["blocksize"])
    factors = _factors(module, tensors, blocks, state)
    data = weight.flatten()
    codes = torch.stack((data >> 4, data & 15), 1).flatten()[:count]
    found = values.index_select(0, codes.int())
    found = found * factors.repeat_interleave(state["blocksize"])[:count]
    return QuantizedMatrix((rows, columns), None, {}, found.view(rows, columns))


def _factors(module: str, tensors: Tensors, blocks: int, state: Mapping[str, Any]) -> Tensor:
    """Return the factor of each block, float32."""
    leaf = "weight.absmax"
    if "nested_blocksize" not in state:
        return require_shape(module, tensors, leaf, (torch.float32,), blocks)
    codes = require_shape(module, tensors, leaf, (torch.uint8,), blocks)
    count, size = -(-blocks // state["nested_blocksize"]), state["nested_blocksize"]
    nested = require_shape(module, tensors, "weight.nested_absmax", (torch.float32,), count)
    values = require_shape(module, tensors, "weight.nested_quant_map", (torch.float32,), 256)
    wide: Tensor = values.index_select(0, codes.int()) * nested.repeat_interleave(size)[:blocks]
    return wide + float(state["nested_offset"])


def _read(module: str, data: Tensor) -> dict[str, Any]:
    """Return the description of a matrix.

    Raises:
        CheckpointError: it is not the JSON that bitsandbytes writes.
    """
    try:
        state = json.loads(bytes(data.flatten().tolist()))
        sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        is_whole = all(type(size) is int and size > 0 for size in sizes) and len(sizes) == 4
        offset = float(state["nested_offset"] if "nested_blocksize" in state else 0.0)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(
            f"{shown_name(module)}.weight.quant_state is not a description of a 4-bit matrix by "
            "bitsandbytes. The checkpoint is damaged; download or copy it again."
        )
    return {**state, "nested_offset": offset}
