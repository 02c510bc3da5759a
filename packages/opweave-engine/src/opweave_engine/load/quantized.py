"""Quantized checkpoints: their formats, and models that keep their weights quantized."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from opweave.ir.ops.low_bit import dequantized_w4
from opweave.layers import FusedMoE, ParallelLMHead, VocabParallelEmbedding
from opweave.layers.embedding import BlockEmbeddingMethod
from opweave.layers.linear import ColumnParallelLinear, LinearBase
from opweave.layers.linear_methods import (
    GROUP,
    ActivationScheme,
    BlockMethod,
    GroupedInt4Method,
    LinearMethod,
    SeparatePartsMethod,
    UnquantizedLinearMethod,
    W8A8Method,
    Weight8Method,
    deferred_weights,
)
from opweave.layers.moe import QuantizedFusedMoEMethod, UnquantizedFusedMoEMethod, experts_format
from opweave_engine.errors import CheckpointError
from opweave_engine.load.checkpoint import (
    Checkpoint,
    QuantizedSource,
    Shapes,
    TensorFile,
    TensorSource,
    build,
    dtypes_of,
    shapes_of,
)
from opweave_engine.models import CausalLM, CheckpointModel, UnsupportedModelError
from opweave_engine.models.weights import shown_name

_log = logging.getLogger(__name__)

# The matrix, in all supported formats.


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Tensors = Mapping[str, Tensor]  # of one module, by the last part of their names


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix ``(out, in)``.

    Attributes:
        shape: of the matrix.
        method: how a linear layer keeps it; None if no layer can.
        parameters: by the names that *method* uses; empty without a method.
        dense: the values, float32; None if they follow from *parameters*.
    """

    shape: tuple[int, int]
    method: LinearMethod | None
    parameters: Tensors
    dense: Tensor | None = None

    def in_input_order(self, order: Tensor | None) -> Self:
        """Undo the column permutation *order* of a dense matrix; otherwise return self."""
        if order is None or self.dense is None:
            return self
        return replace(self, dense=self.dense[:, torch.argsort(order).to(self.dense.device)])

    def parameters_for(self, method: LinearMethod) -> dict[str, Tensor]:
        """Return the parameters for a layer whose *method* may divide blocks into smaller ones."""
        rows = method.block_rows if isinstance(method, W8A8Method) else None
        if rows is None:
            return dict(self.parameters)
        scale = self.parameters["scale"].repeat_interleave(GROUP // rows, 0)
        return {**self.parameters, "scale": scale[: self.shape[0] // rows].contiguous()}

    def values(self) -> Tensor:
        """Return the matrix in float32."""
        if self.dense is not None:
            return self.dense
        weight, scale = self.parameters["weight"], self.parameters["scale"].float()
        if isinstance(self.method, (Weight8Method, W8A8Method)):
            return weight.float() * (scale[:, None] if scale.ndim == 1 else _spread(scale, weight))
        assert isinstance(self.method, GroupedInt4Method), self.method
        values = dequantized_w4(weight, scale, self.parameters.get("offset"), torch.float32)
        if self.method.is_ordered:
            return values[:, torch.argsort(self.parameters["order"])]
        return values


def grouped_int4(
    module: str, q: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None
) -> QuantizedMatrix:
    """Return the matrix ``(q - zero) * scale`` as ``ir.ops.linear_w4a16`` takes it.

    Args:
        module: its name, for errors.
        q: ``(out, in)`` uint8, 0 to 15.
        scale: ``(out, groups)``.
        zero: ``(out, groups)``, 0 to 16; None: 8.
        order: ``(in,)``, the input of each column of *q*; None: in order.
    """
    if q.shape[1] % (2 * scale.shape[1]):
        raise misfit(
            module, "weight", scale, f"scales of equal, even groups of {q.shape[1]} inputs"
        )
    if zero is not None and bool((zero == 8).all()):
        zero = None
    parameters = {"weight": q[:, ::2] | (q[:, 1::2] << 4), "scale": scale}
    if zero is not None:
        # In float32: the products have more bits than a scale of 16 bits has.
        scale = parameters["scale"] = scale.float()
        parameters["offset"] = -zero.to(scale.device) * scale
    if order is not None:
        parameters["order"] = order
    method = GroupedInt4Method(
        q.shape[1] // scale.shape[1], scale.dtype, zero is not None, order is not None
    )
    return QuantizedMatrix((q.shape[0], q.shape[1]), method, parameters)


def dense_matrix(q: Tensor, scale: Tensor, zero: Tensor | None = None) -> QuantizedMatrix:
    """Return the matrix ``(q - zero) * scale``, which no layer keeps quantized.

    Args:
        q: ``(out, in)``.
        scale: ``(out, groups)``.
        zero: likewise.
    """
    wide = q.float().view(*scale.shape, -1)
    if zero is not None:
        wide = wide - zero.to(wide.device).float()[..., None]
    values = (wide * scale.float()[..., None]).flatten(1)
    return QuantizedMatrix((q.shape[0], q.shape[1]), None, {}, values)


def rowwise_8bit_matrix(
    module: str,
    tensors: Tensors,
    weight: Tensor,
    scale: Tensor,
    activations: ActivationScheme | None = None,
) -> QuantizedMatrix:
    """Return a matrix of 8 bits with one scale for each row, or for all of them.

    Args:
        module: its name, for errors.
        tensors: its tensors, of which a static scheme of activations needs one.
        weight: ``(out, in)``.
        scale: one number, or one for each row.
        activations: how activations are quantized; None: not at all.
    """
    rows = weight.shape[0]
    if scale.numel() not in (1, rows):
        raise misfit(module, "weight_scale", scale, f"one number, or one for each of {rows} rows")
    wide = scale.float().reshape(-1).expand(rows).contiguous()
    parameters = {"weight": weight, "scale": wide}
    shape = (rows, weight.shape[1])
    if activations is None:
        return QuantizedMatrix(shape, Weight8Method(weight.dtype), parameters)
    if activations.is_static:
        static = tensors.get("input_scale", tensors.get("activation_scale"))
        if static is None or static.numel() != 1:
            static = require_shape(module, tensors, "input_scale", FLOATS, 1)
        parameters["input_scale"] = static.float().reshape(1)
    return QuantizedMatrix(shape, W8A8Method(weight.dtype, activations), parameters)


def is_blocked(weight: Tensor, scale: Tensor) -> bool:
    """Whether *scale* has a number for each block of a float8 *weight*."""
    is_float8, is_by_row = weight.dtype is torch.float8_e4m3fn, scale.shape == (len(weight), 1)
    return is_float8 and not is_by_row and scale.ndim == 2 and scale.numel() > 1


def blockwise_fp8_matrix(
    module: str, weight: Tensor, scale: Tensor, activations: ActivationScheme | None
) -> QuantizedMatrix:
    """Return a float8 matrix with a scale for each block of 128 rows and columns.

    A layer keeps it quantized if activations are, too, and there are only whole columns of blocks.
    """
    shape = (weight.shape[0], weight.shape[1])
    blocks = tuple(-(-size // GROUP) for size in shape)
    if tuple(scale.shape) != blocks:
        expected = f"{blocks}, one for each {GROUP}x{GROUP} block"
        raise misfit(module, "weight_scale_inv", scale, expected)
    if activations is None or activations.is_static or shape[1] % GROUP:
        return QuantizedMatrix(shape, None, {}, weight.float() * _spread(scale.float(), weight))
    method = W8A8Method(weight.dtype, activations, GROUP)
    return QuantizedMatrix(shape, method, {"weight": weight, "scale": scale.float()})


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """Return a number for each element of *weight*, from those of blocks."""
    wide = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return wide[: weight.shape[0], : weight.shape[1]]


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned values in the last dimension of *packed*, lowest bits first, uint8.

    Args:
        packed: int32 or uint8.
        bits: 4 or 8.
    """
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def require_shape(
    module: str, tensors: Tensors, leaf: str, dtypes: tuple[torch.dtype, ...], *shape: int | None
) -> Tensor:
    """Return the tensor *leaf* of *module*.

    Args:
        module: its name, for errors.
        tensors: its tensors.
        leaf: the last part of the tensor's name.
        dtypes: the accepted dtypes.
        shape: the expected shape; None accepts any size.

    Raises:
        CheckpointError: it is missing, or has another shape or dtype.
    """
    tensor = tensors.get(leaf)
    if tensor is None:
        raise CheckpointError(
            f"{shown_name(module)} is quantized, but the checkpoint has no {leaf} for it. Download "
            "or copy the checkpoint again."
        )
    fits = tensor.ndim == len(shape) and all(
        size in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        sizes = ", ".join("n" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise misfit(module, leaf, tensor, f"{names} ({sizes})")
    return tensor


def misfit(module: str, leaf: str, tensor: Tensor, expected: str) -> CheckpointError:
    """Return the error for a tensor of another form."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return CheckpointError(
        f"{shown_name(module)}.{leaf} is {dtype} {tuple(tensor.shape)}; it must be {expected}. The "
        "checkpoint is damaged, or its quantization_config does not belong to it."
    )


def sorted_columns(module: str, index: Tensor, groups: int) -> Tensor | None:
    """Return the order of inputs in which each group's are together; None if they are already.

    Args:
        module: its name, for errors.
        index: ``(in,)``, the group of each input.
        groups: the number of groups, which must have the same size.

    Raises:
        CheckpointError: the index is not one of equal groups.
    """
    size = index.shape[0] // groups
    expected = torch.arange(groups).repeat_interleave(size)
    order = torch.argsort(index, stable=True)
    if not torch.equal(index[order].long(), expected):
        raise CheckpointError(
            f"{shown_name(module)}: g_idx does not name {groups} groups of {size} inputs; groups "
            "of different sizes are not supported."
        )
    return None if torch.equal(index.long(), expected) else order


# Reads a ``quantization_config``: every key is known, and every value is supported.


class StrictConfig:
    """The object of a configuration.

    Args:
        config: the object.
        name: of the format, for errors.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self._read: set[str] = set()

    def one_of(self, key: str, *supported: Any, default: Any = None) -> Any:
        """Return the value of *key*; absent and null mean *default*.

        Raises:
            UnsupportedModelError: it is not one of *supported*.
        """
        self._read.add(key)
        value = self.config.get(key)
        value = default if value is None else value
        if not any(value == option and type(value) is type(option) for option in supported):
            raise self._unsupported(f"{key}={value!r}", supported)
        return value

    def nested(self, key: str) -> Self:
        """Return the object *key*; absent and null are an empty one."""
        self._read.add(key)
        value = self.config.get(key)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self._unsupported(f"{key}={value!r}", ("an object",))
        return type(self)(value, f"{self.name}, {key}")

    def refuse_set(self, *keys: str) -> None:
        """Refuse any value of *keys* but an empty one."""
        self._read |= {*keys}
        for key in keys:
            if value := self.config.get(key):
                raise self._unsupported(f"{key}={value!r}", ("nothing",))

    def finish(self, *harmless: str) -> None:
        """Refuse keys that were not read, but for the *harmless* ones.

        These follow from the tensors, or do not affect inference.
        """
        if unknown := sorted(self.config.keys() - self._read - {*harmless}):
            raise self._unsupported(f"the key {unknown[0]!r}", ())

    def _unsupported(self, setting: str, supported: tuple[Any, ...]) -> UnsupportedModelError:
        options = f" Supported: {', '.join(map(repr, supported))}." if supported else ""
        return UnsupportedModelError(
            f"quantization_config ({self.name}) has {setting[:200]}, which is not supported."
            f"{options}"
        )


class Format:
    """How checkpoints of a kind store their matrices.

    Args:
        config: ``quantization_config``.

    Attributes:
        main: the last parts of names, of which each quantized module has one.
        leaves: of all tensors that belong to a quantized matrix.
        values_needed: of tensors whose values decide how a layer keeps the matrix.
        notes: parts of the configuration that are not followed, for the log.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main: ClassVar[tuple[str, ...]]
    leaves: ClassVar[tuple[str, ...]]
    values_needed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self._read(StrictConfig(config, str(config.get("quant_method"))))

    def _read(self, config: StrictConfig) -> None:
        """Read the configuration."""
        raise NotImplementedError

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module*; without values, for tensors on the device "meta".

        Raises:
            CheckpointError: tensors are missing or do not fit each other.
        """
        raise NotImplementedError


# Checkpoints of compressed-tensors: int4, int8 and float8 weights.
#
# Source of the layout: ``compressors`` of https://github.com/vllm-project/compressed-tensors.
# ``weight_packed`` ``(out, in * bits / 32)`` packs inputs, lowest bits first, as unsigned
# numbers; ``weight_zero_point`` ``(out * bits / 32, groups)`` packs outputs.


_MIXED = "mixed-precision"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", _MIXED)
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block")}
_BLOCKS = ([GROUP, GROUP], f"{GROUP}x{GROUP}")  # older versions write a text
# Keys that tell how scales were chosen, and the dtypes in which the tensors are stored.
_STORAGE_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_REORDERED = ("group", "dynamic")  # values of actorder that need the group of each input
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_PATTERN = "re:"


class CompressedTensors(Format):
    """Checkpoints of compressed-tensors."""

    main = ("weight_packed", "weight_scale")
    leaves = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
              "weight_g_idx", "input_scale", "input_zero_point")  # fmt: skip
    values_needed = ("weight_g_idx", "weight_shape", "weight_zero_point")

    def _read(self, config: StrictConfig) -> None:
        config.one_of("format", *_FORMATS)
        config.one_of("quantization_status", "compressed", "frozen", default="compressed")
        config.refuse_set("transform_config", "moe_sparsity_config")
        sparsity = config.nested("sparsity_config")
        if sparsity.config:
            sparsity.one_of("format", "dense", default="dense")
        groups = config.nested("config_groups")
        self._schemes: list[Mapping[str, Any]] = []
        self._groups = [self._read_group(groups.nested(name)) for name in groups.config]
        config.finish(
            *("quant_method", "version", "ignore", "global_compression_ratio", "kv_cache_scheme"),
            "run_compressed",
        )

    def _read_group(self, group: StrictConfig) -> tuple[list[str], ActivationScheme | None]:
        """Return the targets of a group, and how their activations are quantized."""
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
        weights.finish("group_size", "block_structure", *_STORAGE_KEYS)
        group.finish("targets")
        if form != _MIXED:
            self._schemes.append(weights.config)
        targets = group.config.get("targets")
        names = [str(target) for target in targets] if isinstance(targets, list) else []
        return names, self._read_activations(activations, weights.config)

    def _read_activations(
        self, activations: StrictConfig, weights: Mapping[str, Any]
    ) -> ActivationScheme | None:
        """Return how activations are quantized; None, with a note for the log: not at all."""
        values = activations.config
        if not values:
            return None
        activations.finish("type", "num_bits", "strategy", "dynamic", "symmetric", "group_size",
                           "block_structure", "actorder", *_STORAGE_KEYS)  # fmt: skip
        is_same = all(
            values.get(key, default) == weights.get(key, default)
            for key, default in (("type", "int"), ("num_bits", 8))
        )
        strategy = values.get("strategy") or ("token" if values.get("dynamic") else "tensor")
        by_weights: dict[Any, bool] = {
            **dict.fromkeys(("tensor", "channel"), strategy in ("token", "tensor")),
            "block": (strategy, values.get("group_size")) == ("group", GROUP),
        }
        fits = by_weights.get(weights.get("strategy", "tensor"), False)
        if not (is_same and fits and values.get("symmetric", True)):
            self.notes.append(
                "activations stay in the model's dtype, input_activations are ignored: supported "
                "are symmetric ones of the 8 bits of the weights, by tensor or token, or for "
                f"blocks of weights by groups of {GROUP}"
            )
            return None
        return ActivationScheme(is_static=not values.get("dynamic"))

    def _activations(self, module: str) -> ActivationScheme | None:
        """Return the value of the group with the most specific target: a name, pattern, or class.

        It is that of the first group if no target names the module: the tensors say that it is
        quantized.
        """

        def rank(target: str) -> int:
            if target.startswith(_PATTERN):
                return 2 * bool(re.match(target.removeprefix(_PATTERN), module))
            return 3 if target == module else int(target == "Linear")

        if not self._groups:
            return None
        return max(self._groups, key=lambda group: max(map(rank, group[0]), default=0))[1]

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        matrix = self._matrix(module, tensors)
        faults = [next(_faults(scheme, tensors, matrix.shape), None) for scheme in self._schemes]
        if faults and None not in faults:
            raise CheckpointError(
                f"{shown_name(module)} does not match config_groups in quantization_config: "
                f"{faults[0]}. The checkpoint is damaged, or its quantization_config does not "
                "belong to it."
            )
        return matrix

    def _matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        if "weight_packed" in tensors:
            return _packed(module, tensors, self._activations(module))
        weight = require_shape(module, tensors, "weight", _EIGHT_BITS, None, None)
        scale = tensors.get("weight_scale")
        if scale is None or scale.dtype not in FLOATS:
            scale = require_shape(module, tensors, "weight_scale", FLOATS, weight.shape[0], None)
        if is_blocked(weight, scale):
            return blockwise_fp8_matrix(module, weight, scale, self._activations(module))
        zero = tensors.get("weight_zero_point")
        is_grouped = scale.ndim == 2 and scale.shape[1] > 1
        if is_grouped or (zero is not None and bool((zero != 0).any())):
            scale = _by_group(module, scale, weight.shape)
            wide = None if zero is None else zero.reshape(-1, zero.shape[-1]).expand(scale.shape)
            return dense_matrix(weight, scale, wide)
        return rowwise_8bit_matrix(module, tensors, weight, scale, self._activations(module))


def _faults(weights: Mapping[str, Any], tensors: Tensors, shape: tuple[int, int]) -> Iterator[str]:
    """Yield the differences between the tensors of a module and the configuration.

    The tensors alone do not tell that some are missing: int4 without zero points is symmetric, and
    a scale for fewer groups is one for larger groups.

    Args:
        weights: of a group in ``config_groups``, with supported values.
        tensors: by the last part of their names.
        shape: ``(out, in)`` of the matrix.
    """
    rows, columns = shape
    kind: str = weights.get("type") or "int"
    size: Any = weights.get("group_size")
    is_float = "weight" in tensors and tensors["weight"].dtype is torch.float8_e4m3fn
    if is_float != (kind == "float"):
        yield f"weights are not of the type {kind!r}"
    if "weight_packed" in tensors:
        bits = tensors["weight_packed"].shape[1] * 32 // columns
        if bits != weights["num_bits"]:
            yield f"weight_packed has {bits} bits for each weight instead of {weights['num_bits']}"
    counts = {"tensor": 1, "channel": rows}
    has_groups = isinstance(size, int) and size > 0
    if has_groups:
        counts["group"] = rows * columns // size
    count = tensors["weight_scale"].numel()
    expected = counts.get(weights.get("strategy") or ("group" if has_groups else "tensor"))
    if expected not in (None, count):
        yield f"weight_scale has {count} values instead of {expected}"
    for is_needed, leaf in (
        (weights.get("symmetric") is False, "weight_zero_point"),
        (weights.get("actorder") in _REORDERED, "weight_g_idx"),
    ):
        if is_needed and leaf not in tensors:
            yield f"{leaf} is missing"


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
        count = -(-rows * bits // 32)
        words = require_shape(module, tensors, "weight_zero_point", (torch.int32,), count, None)
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
        return rowwise_8bit_matrix(module, tensors, (q ^ 128).view(torch.int8), scale, activations)
    middle = torch.full(scale.shape, 128, dtype=torch.int32) if zero is None else zero
    return dense_matrix(q, scale, middle).in_input_order(order)


def _by_group(module: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``(out, groups)`` of a scale for a tensor, for each row, or for each group."""
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    if scale.ndim != 2 or scale.shape[0] != rows or columns % scale.shape[1]:
        expected = f"one number, or ({rows}, groups) with groups that divide {columns} inputs"
        raise misfit(module, "weight_scale", scale, expected)
    return scale


# GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.
#
# Source of the method: arXiv:2210.17323. The layout is that of ``QuantLinear`` in both
# libraries: ``qweight`` ``(in * bits / 32, out)`` packs inputs, ``qzeros`` ``(groups, out * bits
# / 32)`` packs outputs, lowest bits first; version 1 stores zeros minus one.


_BITS = (4, 8)
_LAYOUTS = ("gptq", "gptq_v2", None)
# Keys that record the quantization procedure, select a kernel, or follow from the tensors.
_IGNORED_GPTQ_KEYS = (
    *("quant_method", "method", "group_size", "sym", "desc_act", "static_groups", "lm_head"),
    *("dynamic", "modules_in_block_to_quantize", "block_name_to_quantize", "damp_percent"),
    *("damp_auto_increment", "true_sequential", "dataset", "tokenizer", "batch_size", "mse"),
    *("module_name_preceding_first_block", "pad_token_id", "max_input_length", "model_seqlen"),
    *("model_name_or_path", "model_file_base_name", "meta", "quantizer", "hyb_act", "pack_impl"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend"),
    *("cache_block_outputs", "act_group_aware", "offload_to_disk", "offload_to_disk_path"),
    *("modules_to_not_convert", "gptaq", "v2", "v2_alpha", "failsafe", "mock_quantization"),
)


class Gptq(Format):
    """Checkpoints of AutoGPTQ and GPTQModel."""

    main = ("qweight",)
    leaves = ("qweight", "qzeros", "scales", "g_idx")
    values_needed = ("g_idx", "qzeros")

    def _read(self, config: StrictConfig) -> None:
        config.one_of("bits", *_BITS)
        forms = [config.one_of(key, *_LAYOUTS) for key in ("checkpoint_format", "format")]
        self._zero_shift = 0 if "gptq_v2" in forms else 1
        config.one_of("pack_dtype", "int32", None)
        config.refuse_set("is_marlin_format", "adapter", "rotation")
        config.finish(*_IGNORED_GPTQ_KEYS)
        values = config.config
        self._is_reordered = bool(values.get("desc_act")) and not values.get("static_groups")

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        packed = require_shape(module, tensors, "qweight", (torch.int32,), None, None)
        outputs = packed.shape[1]
        scales = require_shape(module, tensors, "scales", FLOATS, None, outputs)
        groups = scales.shape[0]
        zeros = require_shape(module, tensors, "qzeros", (torch.int32,), groups, None)
        # Layers may have their own number of bits ("dynamic" in the configuration).
        bits = zeros.shape[1] * 32 // outputs
        if bits not in _BITS or outputs * bits != zeros.shape[1] * 32:
            raise misfit(module, "qzeros", zeros, f"4 or 8 bits for each of {outputs} outputs")
        inputs = packed.shape[0] * 32 // bits
        zero = (unpacked(zeros, bits).to(torch.int32) + self._zero_shift).T
        order = None
        if "g_idx" in tensors or (self._is_reordered and groups > 1):
            index = require_shape(module, tensors, "g_idx", (torch.int32, torch.int64), inputs)
            order = sorted_columns(module, index, groups)
        q = unpacked(packed.T, bits)
        if order is not None:
            q = q[:, order.to(q.device)]
        if bits == 4:
            return grouped_int4(module, q, scales.T.contiguous(), zero.contiguous(), order)
        return dense_matrix(q, scales.T, zero).in_input_order(order)


# AWQ checkpoints, as AutoAWQ's version "gemm" writes them.
#
# Source of the method: arXiv:2306.00978. The layout is that of ``WQLinear_GEMM``: ``qweight``
# ``(in, out / 8)`` and ``qzeros`` ``(groups, out / 8)`` pack eight outputs, in the order 0, 2,
# 4, 6, 1, 3, 5, 7 from the lowest bits.


_OUTPUT_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # of each output in a word
_PER_WORD = len(_OUTPUT_POSITIONS)


class Awq(Format):
    """Checkpoints of AutoAWQ."""

    main = ("qweight",)
    leaves = ("qweight", "qzeros", "scales")
    values_needed = ("qzeros",)

    def _read(self, config: StrictConfig) -> None:
        config.one_of("bits", 4, default=config.config.get("w_bit"))
        config.one_of("version", "gemm", "GEMM", default="gemm")
        config.one_of("zero_point", True, default=True)
        config.finish(
            *("quant_method", "group_size", "q_group_size", "modules_to_not_convert", "backend"),
            *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "w_bit"),
        )

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        packed = require_shape(module, tensors, "qweight", (torch.int32,), None, None)
        words = packed.shape[1]
        scales = require_shape(module, tensors, "scales", FLOATS, None, words * _PER_WORD)
        zeros = require_shape(module, tensors, "qzeros", (torch.int32,), scales.shape[0], words)
        q, zero = _outputs(packed).T.contiguous(), _outputs(zeros).T.to(torch.int32)
        return grouped_int4(module, q, scales.T.contiguous(), zero.contiguous(), None)


def _outputs(packed: Tensor) -> Tensor:
    """Return ``(n, out)`` of ``(n, out / 8)``."""
    words = torch.unflatten(unpacked(packed, 4), 1, (-1, _PER_WORD))
    return words[..., _OUTPUT_POSITIONS].flatten(1)


# Checkpoints of bitsandbytes: 4-bit nf4 and fp4 (arXiv:2305.14314), and LLM.int8().
#
# A matrix of 4 bits has tensors ``weight`` (two codes per byte, the first in the high bits),
# ``weight.absmax`` (the factor of each block), ``weight.quant_map`` (the value of each code) and
# ``weight.quant_state.*`` (JSON). With double quantization, the factors are codes, too.


_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_FACTORS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
_MAX_INT8 = 127.0
_WEIGHT_ORDERS = ("row", "col32", "col_turing", "col_ampere")  # by weight_format


class BitsAndBytes(Format):
    """Checkpoints of bitsandbytes."""

    main = (*_STATES, "SCB")
    leaves = ("weight", *_FACTORS, *_STATES, "SCB", "weight_format")
    values_needed = (*_STATES, "weight_format")

    def _read(self, config: StrictConfig) -> None:
        config.one_of("bnb_4bit_quant_type", "nf4", "fp4", default="nf4")
        config.one_of("bnb_4bit_quant_storage", "uint8", default="uint8")
        config.finish(
            *("quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
            *("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
            *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight"),
            "llm_int8_enable_fp32_cpu_offload",
        )
        if config.config.get("load_in_8bit"):
            self.notes.append("activations stay in the model's dtype, LLM.int8() quantizes them")

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        state = next((tensors[leaf] for leaf in _STATES if leaf in tensors), None)
        if state is not None:
            return _of_4_bits(module, tensors, _described(module, state))
        _require_rows(module, tensors.get("weight_format"))
        weight = require_shape(module, tensors, "weight", (torch.int8,), None, None)
        scale = require_shape(module, tensors, "SCB", FLOATS, weight.shape[0])
        return rowwise_8bit_matrix(module, tensors, weight, scale.float() / _MAX_INT8)


def _require_rows(module: str, order: Tensor | None) -> None:
    """Raise UnsupportedModelError unless an int8 matrix is stored row by row."""
    values = [0] if order is None else order.flatten().tolist()
    if values != [0]:
        number = values[0] if len(values) == 1 and 0 <= values[0] < len(_WEIGHT_ORDERS) else None
        name = "" if number is None else f" ({_WEIGHT_ORDERS[number]})"
        raise UnsupportedModelError(
            f"{shown_name(module)}.weight_format is {values[0] if values else values}{name}, an "
            "order of the int8 weights that is not supported. Supported: 0 (row). Save the "
            "checkpoint again with bitsandbytes 0.45 or newer."
        )


def _of_4_bits(module: str, tensors: Tensors, state: Mapping[str, Any]) -> QuantizedMatrix:
    rows, columns = state["shape"]
    weight, count = tensors.get("weight"), rows * columns
    if weight is None or weight.dtype is not torch.uint8 or weight.numel() != -(-count // 2):
        expected = f"uint8, {-(-count // 2)} bytes for ({rows}, {columns})"
        raise misfit(module, "weight", torch.empty(0) if weight is None else weight, expected)
    values = require_shape(module, tensors, "weight.quant_map", (torch.float32,), 16)
    blocks = -(-count // state["blocksize"])
    factors = _factors(module, tensors, blocks, state)
    data = weight.flatten()
    codes = torch.stack((data >> 4, data & 15), 1).flatten()[:count]
    dense = values.index_select(0, codes.int())
    dense = dense * factors.repeat_interleave(state["blocksize"])[:count]
    return QuantizedMatrix((rows, columns), None, {}, dense.view(rows, columns))


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


def _described(module: str, data: Tensor) -> dict[str, Any]:
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


# Checkpoints of float8 weights, as DeepSeek, Qwen and vLLM's tools write them.
#
# Scales are numbers to multiply by: ``weight_scale`` for a whole matrix or each row,
# ``weight_scale_inv`` for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3).


_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(Format):
    """Checkpoints of float8 weights."""

    main = _SCALES
    leaves = ("weight", *_SCALES, "input_scale", "activation_scale", "input_scale_ub")

    def _read(self, config: StrictConfig) -> None:
        config.one_of("fmt", "e4m3", default="e4m3")
        scheme = config.one_of("activation_scheme", "dynamic", "static", default="dynamic")
        config.one_of("weight_block_size", [128, 128], None)
        config.finish(
            *("quant_method", "ignored_layers", "modules_to_not_convert", "activation_scale_ub"),
            *("kv_cache_scheme", "scale_fmt", "dequantize"),
        )
        bound, scales = (config.config.get(key) for key in ("activation_scale_ub", "scale_fmt"))
        upper = float(bound) if isinstance(bound, (int, float)) else None
        self._activations = ActivationScheme(scheme == "static", upper, scales == "ue8m0")

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        weight = require_shape(module, tensors, "weight", (torch.float8_e4m3fn,), None, None)
        leaf = next((leaf for leaf in _SCALES if leaf in tensors), _SCALES[-1])
        scale = tensors.get(leaf)
        if scale is None or scale.dtype not in FLOATS:
            scale = require_shape(module, tensors, leaf, FLOATS, 1)
        if leaf == "weight_scale_inv" or is_blocked(weight, scale):
            return blockwise_fp8_matrix(module, weight, scale, self._activations)
        return rowwise_8bit_matrix(module, tensors, weight, scale, self._activations)


# The tensors of a quantized checkpoint, matrix by matrix.


class QuantizedFiles:
    """A checkpoint's files: a :class:`~opweave_engine.load.checkpoint.QuantizedSource`.

    Args:
        files: open.
        form: how they store matrices.

    Attributes:
        num_dense: the number of quantized matrices that no layer keeps quantized.

    Raises:
        CheckpointError: tensors are missing or do not fit each other.
    """

    def __init__(self, files: Sequence[TensorFile], form: Format) -> None:
        self._form = form
        shapes = shapes_of(files)
        self._files = {name: file for file in files for name in file.shapes()}
        self._dtypes = dtypes_of(files)
        self._modules = self._quantized_modules()
        self.file: Path = files[0].file
        planned = {
            module: form.matrix(module, self._planned(names, shapes))
            for module, names in self._modules.items()
        }
        self.methods: Mapping[str, LinearMethod] = {
            module: matrix.method for module, matrix in planned.items() if matrix.method is not None
        }
        self.num_dense = len(planned) - len(self.methods)
        used = {name for names in self._modules.values() for name in names.values()}
        self._shapes = {name: shape for name, shape in shapes.items() if name not in used}
        self._shapes |= {f"{module}.weight": matrix.shape for module, matrix in planned.items()}

    def shapes(self) -> Shapes:
        return dict(self._shapes)

    def tensor(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self._modules:
            return self._matrix(module).values()
        return self._files[name].tensor(name)

    def parameters(self, module: str, method: LinearMethod) -> dict[str, Tensor]:
        return self._matrix(module).parameters_for(method)

    def _matrix(self, module: str) -> QuantizedMatrix:
        names = self._modules[module]
        tensors = {leaf: self._files[name].tensor(name) for leaf, name in names.items()}
        return self._form.matrix(module, tensors)

    def _quantized_modules(self) -> dict[str, dict[str, str]]:
        """Return the tensors of each quantized module, by the last part of their names."""
        tensors = [(*_split(name), name) for name in self._dtypes]
        modules: dict[str, dict[str, str]] = {}
        for module, leaf, name in tensors:
            is_narrow = leaf == "weight" and self._dtypes[name] in ("I8", "F8_E4M3")
            if leaf in self._form.main or is_narrow:
                modules[module] = {}
        for module, leaf, name in tensors:
            if module in modules and leaf in self._form.leaves:
                modules[module][leaf] = name
        return modules

    def _planned(self, names: Mapping[str, str], shapes: Shapes) -> dict[str, Tensor]:
        """Return tensors without values, where those are not needed."""
        return {
            leaf: self._files[name].tensor(name)
            if leaf in self._form.values_needed
            else torch.empty(shapes[name], dtype=_TORCH_DTYPES[self._dtypes[name]], device="meta")
            for leaf, name in names.items()
        }


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and its name there, such as ``weight.absmax``."""
    module, dot, leaf = name.partition(".weight.")
    if dot:
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module, leaf


_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


# Recognizes quantized checkpoints, and the formats that are supported.
#
# The tensors decide: a configuration left over from quantization does no harm to plain weights.


# Keys of config.json: of most formats, of older compressed-tensors, and of MLX.
_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
# Files of GPTQ, AWQ and ModelOpt.
_CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_UNQUANTIZED_DTYPES = ("F64", "F32", "F16", "BF16")
# How names end in GPTQ and AWQ, compressed-tensors and fp8, bitsandbytes, mxfp4, and MLX.
_QUANTIZED_SUFFIXES = (
    *(".qweight", ".qzeros", ".g_idx"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
    *(".weight_shape", ".input_scale", ".weight_scale_2"),
    *(".SCB", ".weight_format", ".absmax", ".quant_map", ".nested_absmax"),
    *("_blocks", "proj_scales"),
    *(".scales", ".biases"),
)
_CACHE_SCALE_SUFFIXES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *("k_proj.output_scale", "v_proj.output_scale"),  # of older compressed-tensors
)


# Methods that quantize weights while the model runs, and may store them unquantized.
_ONLINE_METHODS = ("bitnet",)

# The supported formats, by quant_method.
FORMATS: Mapping[str, type[Format]] = {
    "compressed-tensors": CompressedTensors, "gptq": Gptq, "awq": Awq, "fp8": Fp8,
    "fbgemm_fp8": Fp8, "bitsandbytes": BitsAndBytes,
}  # fmt: skip

_SUPPORTED = (
    "quantized checkpoints are not supported in this form. Supported, by opweave's own models: "
    f"quant_method {', '.join(FORMATS)} in config.json, and GGUF files."
)


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor is a scale of a quantized KV cache; other caches ignore it."""
    return name.endswith(_CACHE_SCALE_SUFFIXES)


def opened(
    config: Mapping[str, Any], checkpoint: Checkpoint, files: Sequence[TensorFile]
) -> tuple[dict[str, Any], list[TensorSource]]:
    """Return *config* without the keys of quantization, and the tensors of *files*.

    Raises:
        UnsupportedModelError: the weights have a quantized format that is not supported.
        CheckpointError: quantized weights are incomplete or do not fit each other.
    """
    method = str(_settings(config).get("quant_method"))
    is_quantized = any(
        name.endswith(_QUANTIZED_SUFFIXES) or _is_quantized(name, dtype)
        for name, dtype in dtypes_of(files).items()
    )
    if method not in FORMATS or not is_quantized:
        return require_unquantized(config, checkpoint, files), [*files]
    form = FORMATS[method](_settings(config))
    source = QuantizedFiles(files, form)
    notes = [*form.notes]
    if source.num_dense:
        notes.append(
            f"{source.num_dense} weights are dequantized while they are loaded, and their "
            "activations are not quantized: no kernel reads 8-bit weights with scales by group, "
            "zero points, or blocks that do not divide the inputs, nor nf4 and fp4"
        )
    for note in dict.fromkeys(notes):
        _log.warning("%s: %s", checkpoint.path, note)
    _warn_of_cache(config, checkpoint, files)
    return without_quantization(config), [source]


def require_unquantized(
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    files: Sequence[TensorFile],
    advice: str = _SUPPORTED,
) -> dict[str, Any]:
    """Return *config* without its quantization keys, or raise if the weights are quantized.

    Args:
        config: the object in ``config.json``.
        checkpoint: the checkpoint.
        files: its tensors.
        advice: the end of the error for quantized weights.

    Raises:
        UnsupportedModelError: the weights are quantized.
    """
    named = _named(config, checkpoint)
    dtypes = dtypes_of(files)
    packed = next((name for name in dtypes if name.endswith(_QUANTIZED_SUFFIXES)), None)
    narrow = next((name for name, dtype in dtypes.items() if _is_quantized(name, dtype)), None)
    if packed is not None or (narrow is not None and named is not None):
        signs = [named, f"the tensor {shown_name(packed or narrow or '')}"]
        raise UnsupportedModelError(
            f"{checkpoint.path} holds quantized weights ({', '.join(filter(None, signs))}); "
            f"{advice}"
        )
    _warn_of_cache(config, checkpoint, files)
    return without_quantization(config)


@contextmanager
def quantization_errors(
    config: Mapping[str, Any], checkpoint: Checkpoint, advice: str = _SUPPORTED
) -> Iterator[None]:
    """Name the checkpoint's quantization format in errors that the block raises.

    An unknown format shows only as tensors that do not fit the unquantized model. If the block
    succeeds, a log message says that the quantization configuration is ignored.

    Args:
        config, checkpoint, advice: as for :func:`require_unquantized`.

    Raises:
        UnsupportedModelError: tensors do not fit, and a format of quantization is named; or it
            quantizes weights while the model runs.
    """
    named = _named(config, checkpoint)
    if str(_settings(config).get("quant_method")) in _ONLINE_METHODS:
        raise UnsupportedModelError(f"{checkpoint.path} has {named}; {advice}")
    try:
        yield
    except CheckpointError as error:
        if named is None:
            raise
        raise UnsupportedModelError(
            f"{checkpoint.path} holds quantized weights ({named}): {str(error).rstrip('.')}; "
            f"{advice}"
        ) from error
    if named is not None:
        _log.warning("%s: %s is ignored: no weight is quantized", checkpoint.path, named)


def _warn_of_cache(
    config: Mapping[str, Any], checkpoint: Checkpoint, files: Sequence[TensorFile]
) -> None:
    """Log that keys and values stay in the model's dtype, if the checkpoint quantizes them."""
    if scales := sum(map(is_cache_scale, dtypes_of(files))):
        subject = f"{scales} scales of a quantized KV cache are"
    elif _settings(config).get("kv_cache_scheme"):
        subject = "kv_cache_scheme is"
    else:
        return
    _log.warning("%s: %s ignored: the cache is not quantized", checkpoint.path, subject)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return *config* without the keys of quantization."""
    return {key: value for key, value in config.items() if key not in _CONFIG_KEYS}


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the configuration of quantization; an empty one if it is missing."""
    objects = (config.get(key) for key in _CONFIG_KEYS[:2])
    return next((value for value in objects if isinstance(value, Mapping)), {})


def _named(config: Mapping[str, Any], checkpoint: Checkpoint) -> str | None:
    """Return what names a format of quantization, for a message; or None."""
    for key in _CONFIG_KEYS:
        if value := config.get(key):
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            return f"{key!r} in config.json with quant_method {method!r}"[:200]
    return next((name for name in _CONFIG_FILES if (checkpoint.path / name).is_file()), None)


def _is_quantized(name: str, dtype: str) -> bool:
    """Return whether a tensor is a weight matrix with a dtype other than F16, BF16, F32, F64."""
    return dtype not in _UNQUANTIZED_DTYPES and name.endswith(("weight", "_proj"))


# Keeps the experts of a checkpoint quantized, where all of a layer have one format.


def set_experts(
    model: CheckpointModel, name: str, layer: FusedMoE, methods: Mapping[str, LinearMethod]
) -> dict[str, LinearMethod]:
    """Choose how *layer* keeps its weights.

    Args:
        model: the model.
        name: the name of *layer* in it.
        layer: whose weights are not loaded yet.
        methods: how quantized matrices are kept, by the model's names of their modules.

    Returns:
        How the modules whose weights stay quantized keep them, by these names.
    """
    gate, down, up = model.experts
    ids = range(layer.num_experts)
    parts = {
        part: [model.own_name(f"{name}.{expert}.{part}") for expert in ids]
        for part in (gate, down, up)
    }
    w13 = _common([*parts[gate], *parts[up]], methods)
    w2 = _common(parts[down], methods)
    layer.prefix = layer.prefix or name  # for errors
    is_interleaved = layer.activation == "swigluoai"
    if w13 is None or w2 is None or is_interleaved or layer.w13_bias is not None:
        layer.set_quant_method(UnquantizedFusedMoEMethod())
        return {}
    w13 = for_outputs(w13, [layer.intermediate_size // layer.placement.tp_size])
    w2 = for_outputs(w2, [layer.hidden_size])
    layer.set_quant_method(QuantizedFusedMoEMethod(w13, w2))
    chosen = {gate: w13, down: w2, up: w13}
    return {module: chosen[part] for part, modules in parts.items() for module in modules}


def for_outputs(method: LinearMethod, sizes: Sequence[int]) -> LinearMethod:
    """Return *method* for outputs of these *sizes*, which blocks must not cross."""
    return method.for_outputs(sizes) if isinstance(method, W8A8Method) else method


def _common(names: Iterable[str], methods: Mapping[str, LinearMethod]) -> LinearMethod | None:
    """Return the method of all these modules; None if it is not one that experts support."""
    distinct = {methods.get(name) for name in names}
    method = distinct.pop()
    return None if distinct or experts_format(method) is None else method


# Builds models whose linear layers keep the weights of a checkpoint quantized.


def build_quantized(
    config: Mapping[str, Any], dtype: torch.dtype, sources: Sequence[TensorSource]
) -> tuple[CheckpointModel, Mapping[str, LinearMethod]]:
    """Build a model for the weights of *sources*, which are not loaded yet.

    Returns:
        The model, and how modules keep a quantized weight, by their names in the checkpoint.
        Quantized weights of all others are to be dequantized.
    """
    methods: dict[str, LinearMethod] = {}
    for source in sources:
        if isinstance(source, QuantizedSource):
            methods |= source.methods
    if not methods:
        return build(config, dtype), {}
    with deferred_weights():
        model = build(config, dtype)
    names = {model.own_name(name): name for name in methods}
    available = {model.own_name(name): method for name, method in methods.items()}
    stored: dict[str, LinearMethod] = {}  # by the model's names of the modules
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LinearBase):
            parts = dict(part_names(model, name))
            layer.prefix = layer.prefix or name  # for errors
            quantized = {} if name.rpartition(".")[2] in model.dense else available
            method = _method(layer, parts, quantized)
            layer.set_quant_method(method)
            of_parts = method.methods if isinstance(method, SeparatePartsMethod) else {}
            for part in parts.keys() & quantized:
                stored[part] = of_parts.get(part.rpartition(".")[2]) or method
        elif isinstance(layer, FusedMoE):
            stored |= set_experts(model, name, layer, available)
    stored |= {name: available[name] for name in _set_tables(model, available)}
    model.requires_grad_(False)
    if dequantized := available.keys() - stored:
        kinds = Counter(names[name].rpartition(".")[2] for name in dequantized)
        _log.warning(
            "%d quantized weights are dequantized to %s while they are loaded, because their "
            "layers have no quantized form: %s",
            len(dequantized), str(dtype).removeprefix("torch."),
            ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())),
        )  # fmt: skip
    return model, {names[name]: method for name, method in stored.items()}


def _set_tables(model: CheckpointModel, methods: Mapping[str, LinearMethod]) -> Iterator[str]:
    """Keep the embedding and the output matrix quantized where they can be; yield their names."""
    is_tied = isinstance(model, CausalLM) and model.is_tied
    for name, layer in list(model.named_modules()):
        method = methods.get(name)
        if method is None or not isinstance(layer, VocabParallelEmbedding):
            continue
        if isinstance(method, BlockMethod):
            method = BlockEmbeddingMethod(method.format)
        elif not isinstance(layer, ParallelLMHead) or not _is_by_rows(method):
            continue  # rows of other forms are not looked up, and blocks of rows not padded
        if not (is_tied and isinstance(layer, ParallelLMHead)):
            layer.set_quant_method(method)
            yield name
            if is_tied and isinstance(model, CausalLM):
                model.lm_head.set_quant_method(method)
                model.lm_head.tie_weights(layer)


def _is_by_rows(method: LinearMethod) -> bool:
    """Whether each row has its own parameters."""
    if not isinstance(method, W8A8Method):
        return True
    return method.block_rows is None and not method.activations.is_static


def part_names(model: CheckpointModel, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what checkpoints call the parts of a layer, with the layer's own names for them."""
    parent, dot, last = name.rpartition(".")
    for part, shard in model.merged.get(last, {last: None}).items():
        yield f"{parent}{dot}{part}", shard


def _method(
    layer: LinearBase, parts: Mapping[str, Any], methods: Mapping[str, LinearMethod]
) -> LinearMethod:
    """Return how *layer* keeps its weights.

    Parts of one form share a product. Parts of different forms, as GGUF has them in one layer, and
    parts that reorder their inputs, keep their own products.
    """
    chosen = [methods.get(part) for part in parts]
    first, sizes = chosen[0], layer.output_partition_sizes
    if all(method == first for method in chosen):
        is_ordered = isinstance(first, GroupedInt4Method) and first.is_ordered
        if len(chosen) == 1 or not is_ordered:
            return for_outputs(first or UnquantizedLinearMethod(), sizes)
    assert isinstance(layer, ColumnParallelLinear), f"{layer} merges {list(parts)}"
    shards = {
        name.rpartition(".")[2]: (layer.parts[shard].index, layer.parts[shard].count)
        for name, shard in parts.items()
    }
    separate = [m and for_outputs(m, [size]) for m, size in zip(chosen, sizes, strict=True)]
    return SeparatePartsMethod(dict(zip(shards, separate, strict=True)), shards)
