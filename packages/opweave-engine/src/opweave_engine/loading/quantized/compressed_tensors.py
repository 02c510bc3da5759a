"""Checkpoints of compressed-tensors: int4, int8 and float8 weights.

Source of the layout: ``compressors`` of https://github.com/vllm-project/compressed-tensors.
``weight_packed`` ``(out, in * bits / 32)`` packs inputs, lowest bits first, as unsigned numbers;
``weight_zero_point`` ``(out * bits / 32, groups)`` packs outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opweave.layers.linear.w8a8 import GROUP, ActivationScheme
from opweave_engine.loading.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Tensors,
    blocks8,
    dense_matrix,
    grouped_int4,
    is_blocked,
    misfit,
    require_shape,
    rows8,
    sorted_columns,
    unpacked,
)
from opweave_engine.loading.quantized.scheme import WeightScheme, check_scheme
from opweave_engine.loading.quantized.strict import StrictConfig
from opweave_engine.loading.quantized.targets import group_for

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
            "mixed-precision")  # fmt: skip
_STRATEGIES = {
    "int": ("tensor", "channel", "group"),
    "float": ("tensor", "channel", "block"),
}
_BLOCKS = ([GROUP, GROUP], f"{GROUP}x{GROUP}")  # older versions write a text
# Keys of how scales were found, and of the dtypes in which the tensors are stored.
_FOUND_BY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_MIXED = "mixed-precision"
_REORDERED = ("group", "dynamic")  # values of actorder that need the group of each input
_EIGHT = (torch.int8, torch.float8_e4m3fn)


class CompressedTensors:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Attributes:
        notes: parts of the configuration that are not followed, for the log.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = ("weight_packed", "weight_scale")
    leaves = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
              "weight_g_idx", "input_scale", "input_zero_point")  # fmt: skip
    values_needed = ("weight_g_idx", "weight_shape", "weight_zero_point")

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = StrictConfig(config, "compressed-tensors")
        read.one_of("format", *_FORMATS)
        read.one_of("quantization_status", "compressed", "frozen", default="compressed")
        read.allow(
            *("quant_method", "version", "ignore", "global_compression_ratio", "kv_cache_scheme"),
            "run_compressed",
        )
        for key in ("transform_config", "moe_sparsity_config"):
            read.refuse_set(key)
        sparsity = read.nested("sparsity_config")
        if sparsity.config:
            sparsity.one_of("format", "dense", default="dense")
        groups = read.nested("config_groups")
        self.notes: list[str] = []
        self._schemes: list[WeightScheme] = []
        self._groups = [self._read_group(groups.nested(name)) for name in groups.config]
        read.finish()

    def _read_group(self, group: StrictConfig) -> tuple[list[str], ActivationScheme | None]:
        """Return the targets of a group, and how their activations are quantized."""
        group.allow("targets")
        form = group.one_of("format", *_FORMATS, default="pack-quantized")
        if group.nested("output_activations").config:
            self.notes.append("output_activations are ignored: outputs stay in the model's dtype")
        activations, weights = group.nested("input_activations"), group.nested("weights")
        kind = weights.one_of("type", "int", "float", default="int")
        weights.one_of("num_bits", *((4, 8) if kind == "int" else (8,)))
        if weights.one_of("strategy", *_STRATEGIES[kind], default="tensor") == "block":
            weights.one_of("block_structure", *_BLOCKS, None)
        weights.one_of("dynamic", False, default=False)
        weights.one_of("actorder", "group", "weight", "static", "dynamic", None)
        weights.one_of("symmetric", True, False, default=True)
        weights.allow("group_size", "block_structure", *_FOUND_BY)
        weights.finish()
        group.finish()
        if form != _MIXED:
            self._schemes.append(_scheme(weights))
        targets = group.config.get("targets")
        names = [str(target) for target in targets] if isinstance(targets, list) else []
        return names, self._read_activations(activations, weights)

    def _read_activations(
        self, activations: StrictConfig, weights: StrictConfig
    ) -> ActivationScheme | None:
        """Return how activations are quantized; None, with a note for the log: not at all."""
        given = activations.config
        if not given:
            return None
        activations.allow("type", "num_bits", "strategy", "dynamic", "symmetric", "group_size",
                          "block_structure", "actorder", *_FOUND_BY)  # fmt: skip
        activations.finish()
        same = all(
            given.get(key, default) == weights.config.get(key, default)
            for key, default in (("type", "int"), ("num_bits", 8))
        )
        strategy = given.get("strategy") or ("token" if given.get("dynamic") else "tensor")
        is_blocked = weights.config.get("strategy") == "block"
        fits = (
            (strategy, given.get("group_size")) == ("group", GROUP)
            if is_blocked
            else (strategy in ("token", "tensor"))
        )
        has_rows = weights.config.get("strategy", "tensor") in ("tensor", "channel", "block")
        if not (same and fits and has_rows and given.get("symmetric", True)):
            self.notes.append(
                "activations stay in the model's dtype, input_activations are ignored: supported "
                "are symmetric ones of the 8 bits of the weights, by tensor or token, or for "
                f"blocks of weights by groups of {GROUP}"
            )
            return None
        return ActivationScheme(is_static=not given.get("dynamic"))

    def _activations(self, module: str) -> ActivationScheme | None:
        return group_for(module, self._groups)

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        found = self._matrix(module, tensors)
        check_scheme(module, tensors, found.shape, self._schemes)
        return found

    def _matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        if "weight_packed" in tensors:
            return _packed(module, tensors, self._activations(module))
        weight = require_shape(module, tensors, "weight", _EIGHT, None, None)
        scale = tensors.get("weight_scale")
        if scale is None or scale.dtype not in FLOATS:
            scale = require_shape(module, tensors, "weight_scale", FLOATS, weight.shape[0], None)
        if is_blocked(weight, scale):
            return blocks8(module, weight, scale, self._activations(module))
        zero = tensors.get("weight_zero_point")
        is_grouped = scale.ndim == 2 and scale.shape[1] > 1
        if is_grouped or (zero is not None and bool((zero != 0).any())):
            scale = _by_group(module, scale, weight.shape)
            wide = None if zero is None else zero.reshape(-1, zero.shape[-1]).expand(scale.shape)
            return dense_matrix(weight, scale, wide)
        return rows8(module, tensors, weight, scale, self._activations(module))


def _scheme(weights: StrictConfig) -> WeightScheme:
    """Return how *weights* of a group, whose values are supported, are stored."""
    given = weights.config
    size = given.get("group_size")
    size = size if isinstance(size, int) and size > 0 else None
    return WeightScheme(
        kind=given.get("type") or "int",
        bits=given["num_bits"],
        strategy=given.get("strategy") or ("tensor" if size is None else "group"),
        group_size=size,
        has_zeros=given.get("symmetric") is False,
        has_index=given.get("actorder") in _REORDERED,
    )


def _packed(module: str, tensors: Tensors, activations: ActivationScheme | None) -> QuantizedMatrix:
    packed = require_shape(module, tensors, "weight_packed", (torch.int32,), None, None)
    shape = require_shape(module, tensors, "weight_shape", (torch.int64, torch.int32), 2)
    rows, columns = map(int, shape.tolist())
    bits = packed.shape[1] * 32 // columns if columns else 0
    if bits not in (4, 8) or packed.shape != (rows, columns * bits // 32) or columns * bits % 32:
        raise misfit(
            module, "weight_packed", packed, f"4 or 8 bits for each weight of ({rows}, {columns})"
        )
    scale = require_shape(module, tensors, "weight_scale", FLOATS, None, None)
    scale = _by_group(module, scale, (rows, columns))
    groups = scale.shape[1]
    zero = order = None
    if "weight_zero_point" in tensors:
        per_word = 32 // bits
        words = require_shape(
            module, tensors, "weight_zero_point", (torch.int32,), -(-rows // per_word), None
        )
        if words.shape[1] != groups:
            raise misfit(module, "weight_zero_point", words, f"int32, with {groups} columns")
        zero = unpacked(words.T, bits)[:, :rows].T.to(torch.int32).contiguous()
    if "weight_g_idx" in tensors:
        index = require_shape(module, tensors, "weight_g_idx", (torch.int32, torch.int64), columns)
        if bool((index >= 0).all()):  # the library fills an unused one with -1
            order = sorted_columns(module, index, groups)
    q = unpacked(packed, bits)
    if order is not None:
        q = q[:, order]
    if bits == 4:
        return grouped_int4(module, q, scale, zero, order)
    if zero is None and groups == 1 and order is None:
        return rows8(module, tensors, (q ^ 128).view(torch.int8), scale, activations)
    middle = torch.full(scale.shape, 128, dtype=torch.int32) if zero is None else zero
    return dense_matrix(q, scale, middle).reordered(order)


def _by_group(module: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``(out, groups)`` of a scale for a tensor, for each row, or for each group."""
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    if scale.ndim != 2 or scale.shape[0] != rows or columns % scale.shape[1]:
        wanted = f"one number, or ({rows}, groups) with groups that divide {columns} inputs"
        raise misfit(module, "weight_scale", scale, wanted)
    return scale
