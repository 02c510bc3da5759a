"""Checkpoints of float8 weights, as DeepSeek, Qwen and vLLM's tools write them.

Scales are numbers to multiply by: ``weight_scale`` for a whole matrix or each row,
``weight_scale_inv`` for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opweave.engine.loading.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Tensors,
    misfit,
    require_shape,
    rows8,
)
from opweave.engine.loading.quantized.strict import StrictConfig

_DTYPES = (torch.float8_e4m3fn,)
_LEAVES = ("weight_scale_inv", "weight_scale")


class Fp8:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = _LEAVES
    leaves = ("weight", *_LEAVES, "input_scale", "activation_scale", "input_scale_ub")
    values_needed = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = StrictConfig(config, str(config.get("quant_method")))
        read.one_of("fmt", "e4m3", default="e4m3")
        read.one_of("activation_scheme", "dynamic", "static", default="dynamic")
        read.one_of("weight_block_size", [128, 128], None)
        read.allow(
            *("quant_method", "ignored_layers", "modules_to_not_convert", "activation_scale_ub"),
            *("kv_cache_scheme", "scale_fmt", "dequantize"),
        )
        read.finish()
        self.notes = ["activations stay in the model's dtype, they are not quantized"]

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        weight = require_shape(module, tensors, "weight", _DTYPES, None, None)
        leaf = next((leaf for leaf in _LEAVES if leaf in tensors), _LEAVES[-1])
        scale = tensors.get(leaf)
        if scale is None or scale.dtype not in FLOATS:
            scale = require_shape(module, tensors, leaf, FLOATS, 1)
        if leaf == "weight_scale_inv" or is_blocked(weight, scale):
            values = block_values(module, weight, scale)
            return QuantizedMatrix((weight.shape[0], weight.shape[1]), None, {}, values)
        return rows8(module, weight, scale)


def is_blocked(weight: Tensor, scale: Tensor) -> bool:
    """Whether *scale* has a number for each block of a float8 *weight*."""
    return (
        weight.dtype is torch.float8_e4m3fn
        and scale.ndim == 2
        and scale.numel() > 1
        and scale.shape != (weight.shape[0], 1)
    )


def block_values(module: str, weight: Tensor, scale: Tensor, size: int = 128) -> Tensor:
    """Return a float8 matrix with a scale for each block of *size* rows and columns, float32."""
    rows, columns = weight.shape
    wanted = (-(-rows // size), -(-columns // size))
    if tuple(scale.shape) != wanted:
        raise misfit(
            module, "weight_scale_inv", scale, f"{wanted}, one for each {size}x{size} block"
        )
    wide = scale.float().repeat_interleave(size, 0).repeat_interleave(size, 1)
    return weight.float() * wide[:rows, :columns]
