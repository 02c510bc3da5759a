"""Checkpoints of float8 weights, as DeepSeek, Qwen and vLLM's tools write them.

Scales are numbers to multiply by: ``weight_scale`` for a whole matrix or each row,
``weight_scale_inv`` for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opweave.layers.linear.w8a8 import ActivationScheme
from opweave_engine.loading.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Tensors,
    blocks8,
    is_blocked,
    require_shape,
    rows8,
)
from opweave_engine.loading.quantized.strict import StrictConfig

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
        scheme = read.one_of("activation_scheme", "dynamic", "static", default="dynamic")
        read.one_of("weight_block_size", [128, 128], None)
        read.allow(
            *("quant_method", "ignored_layers", "modules_to_not_convert", "activation_scale_ub"),
            *("kv_cache_scheme", "scale_fmt", "dequantize"),
        )
        read.finish()
        self.notes: list[str] = []
        bound = config.get("activation_scale_ub")
        self._activations = ActivationScheme(
            is_static=scheme == "static",
            upper_bound=float(bound) if isinstance(bound, (int, float)) else None,
            use_ue8m0=config.get("scale_fmt") == "ue8m0",
        )

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        weight = require_shape(module, tensors, "weight", _DTYPES, None, None)
        leaf = next((leaf for leaf in _LEAVES if leaf in tensors), _LEAVES[-1])
        scale = tensors.get(leaf)
        if scale is None or scale.dtype not in FLOATS:
            scale = require_shape(module, tensors, leaf, FLOATS, 1)
        if leaf == "weight_scale_inv" or is_blocked(weight, scale):
            return blocks8(module, weight, scale, self._activations)
        return rows8(module, tensors, weight, scale, self._activations)
