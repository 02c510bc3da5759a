"""The formats of quantized checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from opweave.layers.linear_methods import GROUP, ActivationScheme
from opweave_engine.errors import CheckpointError
from opweave_engine.load.matrix import (
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
from opweave_engine.models import UnsupportedModelError
from opweave_engine.models.weights import shown_name

# Reads a ``quantization_config``: every key is known, and every value is supported.


class StrictConfig:
    """The object of a configuration.

    Args:
        config: the object.
        name: of the format, for errors.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self._known: set[str] = set()

    def one_of(self, key: str, *supported: Any, default: Any = None) -> Any:
        """Return the value of *key*; absent and null mean *default*.

        Raises:
            UnsupportedModelError: it is not one of *supported*.
        """
        self._known.add(key)
        found = self.config.get(key)
        found = default if found is None else found
        if not any(found == value and type(found) is type(value) for value in supported):
            raise self.unsupported(f"{key}={found!r}", supported)
        return found

    def nested(self, key: str) -> StrictConfig:
        """Return the object *key*; absent and null are an empty one."""
        self._known.add(key)
        found = self.config.get(key)
        found = {} if found is None else found
        if not isinstance(found, Mapping):
            raise self.unsupported(f"{key}={found!r}", ("an object",))
        return StrictConfig(found, f"{self.name}, {key}")

    def allow(self, *keys: str) -> None:
        """Accept any value of *keys*: the tensors tell, or it means nothing to inference."""
        self._known |= {*keys}

    def refuse_set(self, key: str) -> None:
        """Refuse any value of *key* but an empty one."""
        self._known.add(key)
        if found := self.config.get(key):
            raise self.unsupported(f"{key}={found!r}", ("nothing",))

    def finish(self) -> None:
        """Refuse keys that were neither read nor allowed."""
        if unknown := sorted(self.config.keys() - self._known):
            raise self.unsupported(f"the key {unknown[0]!r}", ())

    def unsupported(self, what: str, supported: tuple[Any, ...]) -> UnsupportedModelError:
        """Return the error for a value."""
        known = f" Supported: {', '.join(map(repr, supported))}." if supported else ""
        return UnsupportedModelError(
            f"quantization_config ({self.name}) has {what[:200]}, which is not supported.{known}"
        )


# Which configuration group of compressed-tensors a module belongs to.


_T = TypeVar("_T")
_PATTERN = "re:"


def group_for(module: str, groups: Sequence[tuple[Sequence[str], _T]]) -> _T | None:
    """Return the value of the group with the most specific target: a name, pattern, or class.

    Args:
        module: the name of a linear layer.
        groups: targets and the value of each group.

    Returns:
        The first group's value if no target names the module: the tensors say that it is quantized.
    """
    for matches in (_is_name, _matches_pattern, _is_class):
        for targets, value in groups:
            if any(matches(target, module) for target in targets):
                return value
    return groups[0][1] if groups else None


def _is_name(target: str, module: str) -> bool:
    return target == module


def _matches_pattern(target: str, module: str) -> bool:
    return target.startswith(_PATTERN) and bool(re.match(target.removeprefix(_PATTERN), module))


def _is_class(target: str, module: str) -> bool:
    return target == "Linear"


# Checks that tensors of compressed-tensors match the configuration.
#
# The tensors alone do not tell that some are missing: int4 without zero points is symmetric, and
# a scale for fewer groups is one for larger groups.


@dataclass(frozen=True)
class WeightScheme:
    """How ``config_groups`` says that weights are stored.

    Attributes:
        kind: ``"int"`` or ``"float"``.
        bits: of a weight.
        strategy: weights with one scale: ``"tensor"``, ``"channel"``, ``"group"`` or ``"block"``.
        group_size: of the strategy ``"group"``; None: not known.
        has_zeros: whether weights have zero points.
        has_index: whether inputs belong to groups in another order.
    """

    kind: str
    bits: int
    strategy: str
    group_size: int | None
    has_zeros: bool
    has_index: bool

    def faults(self, tensors: Tensors, shape: tuple[int, int]) -> Iterator[str]:
        """Yield the differences between *tensors* and this scheme.

        Args:
            tensors: of one module, by the last part of their names.
            shape: ``(out, in)`` of its matrix.
        """
        rows, columns = shape
        is_float = "weight" in tensors and tensors["weight"].dtype is torch.float8_e4m3fn
        if is_float != (self.kind == "float"):
            yield f"weights are not of the type {self.kind!r}"
        if "weight_packed" in tensors:
            bits = tensors["weight_packed"].shape[1] * 32 // columns
            if bits != self.bits:
                yield f"weight_packed has {bits} bits for each weight instead of {self.bits}"
        counts = {"tensor": 1, "channel": rows}
        if self.group_size:
            counts["group"] = rows * columns // self.group_size
        found, wanted = tensors["weight_scale"].numel(), counts.get(self.strategy)
        if wanted not in (None, found):
            yield f"weight_scale has {found} values instead of {wanted}"
        for is_needed, leaf in (
            (self.has_zeros, "weight_zero_point"),
            (self.has_index, "weight_g_idx"),
        ):
            if is_needed and leaf not in tensors:
                yield f"{leaf} is missing"


def check_scheme(
    module: str, tensors: Tensors, shape: tuple[int, int], schemes: Sequence[WeightScheme]
) -> None:
    """Check that the tensors of *module* match one of *schemes*, if there are any.

    Raises:
        CheckpointError: they do not.
    """
    faults = [next(scheme.faults(tensors, shape), None) for scheme in schemes]
    if faults and None not in faults:
        raise CheckpointError(
            f"{shown_name(module)} does not match config_groups in quantization_config: "
            f"{faults[0]}. The checkpoint is damaged, or its quantization_config does not belong "
            "to it."
        )


# Checkpoints of compressed-tensors: int4, int8 and float8 weights.
#
# Source of the layout: ``compressors`` of https://github.com/vllm-project/compressed-tensors.
# ``weight_packed`` ``(out, in * bits / 32)`` packs inputs, lowest bits first, as unsigned
# numbers; ``weight_zero_point`` ``(out * bits / 32, groups)`` packs outputs.


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


# GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.
#
# Source of the method: arXiv:2210.17323. The layout is that of ``QuantLinear`` in both
# libraries: ``qweight`` ``(in * bits / 32, out)`` packs inputs, ``qzeros`` ``(groups, out * bits
# / 32)`` packs outputs, lowest bits first; version 1 stores zeros minus one.


_BITS = (4, 8)
_FORMS = ("gptq", "gptq_v2", None)
# Keys of how the weights were found, and of kernels; and those that the tensors tell.
_HARMLESS = (
    *("quant_method", "method", "group_size", "sym", "desc_act", "static_groups", "lm_head"),
    *("dynamic", "modules_in_block_to_quantize", "block_name_to_quantize", "damp_percent"),
    *("damp_auto_increment", "true_sequential", "dataset", "tokenizer", "batch_size", "mse"),
    *("module_name_preceding_first_block", "pad_token_id", "max_input_length", "model_seqlen"),
    *("model_name_or_path", "model_file_base_name", "meta", "quantizer", "hyb_act", "pack_impl"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend"),
    *("cache_block_outputs", "act_group_aware", "offload_to_disk", "offload_to_disk_path"),
    *("modules_to_not_convert", "gptaq", "v2", "v2_alpha", "failsafe", "mock_quantization"),
)


class Gptq:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = ("qweight",)
    leaves = ("qweight", "qzeros", "scales", "g_idx")
    values_needed = ("g_idx", "qzeros")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        read = StrictConfig(config, "gptq")
        read.one_of("bits", *_BITS)
        forms = [read.one_of(key, *_FORMS) for key in ("checkpoint_format", "format")]
        self._zero_shift = 0 if "gptq_v2" in forms else 1
        read.one_of("pack_dtype", "int32", None)
        for key in ("is_marlin_format", "adapter", "rotation"):
            read.refuse_set(key)
        read.allow(*_HARMLESS)
        read.finish()
        self._is_reordered = bool(config.get("desc_act")) and not config.get("static_groups")

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
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
        return dense_matrix(q, scales.T, zero).reordered(order)


# AWQ checkpoints, as AutoAWQ's version "gemm" writes them.
#
# Source of the method: arXiv:2306.00978. The layout is that of ``WQLinear_GEMM``: ``qweight``
# ``(in, out / 8)`` and ``qzeros`` ``(groups, out / 8)`` pack eight outputs, in the order 0, 2,
# 4, 6, 1, 3, 5, 7 from the lowest bits.


_PER_WORD = 8
# Where in a word each output is.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    """The format of the checkpoints.

    Args:
        config: ``quantization_config``.

    Raises:
        UnsupportedModelError: it asks for something that is not supported.
    """

    main = ("qweight",)
    leaves = ("qweight", "qzeros", "scales")
    values_needed = ("qzeros",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = StrictConfig(config, "awq")
        self.notes: list[str] = []
        read.one_of("bits", 4, default=read.config.get("w_bit"))
        read.one_of("version", "gemm", "GEMM", default="gemm")
        read.one_of("zero_point", True, default=True)
        read.allow(
            *("quant_method", "group_size", "q_group_size", "modules_to_not_convert", "backend"),
            *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "w_bit"),
        )
        read.finish()

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module* from its tensors."""
        packed = require_shape(module, tensors, "qweight", (torch.int32,), None, None)
        words = packed.shape[1]
        scales = require_shape(module, tensors, "scales", FLOATS, None, words * _PER_WORD)
        groups = scales.shape[0]
        zeros = require_shape(module, tensors, "qzeros", (torch.int32,), groups, words)
        q, zero = _outputs(packed).T.contiguous(), _outputs(zeros).T.to(torch.int32)
        return grouped_int4(module, q, scales.T.contiguous(), zero.contiguous(), None)


def _outputs(packed: Tensor) -> Tensor:
    """Return ``(n, out)`` of ``(n, out / 8)``."""
    words = torch.unflatten(unpacked(packed, 4), 1, (-1, _PER_WORD))
    return words[..., list(_PLACES)].flatten(1)


# Checkpoints of bitsandbytes: 4-bit nf4 and fp4 (arXiv:2305.14314), and LLM.int8().
#
# A matrix of 4 bits has tensors ``weight`` (two codes per byte, the first in the high bits),
# ``weight.absmax`` (the factor of each block), ``weight.quant_map`` (the value of each code) and
# ``weight.quant_state.*`` (JSON). With double quantization, the factors are codes, too.


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


# Checkpoints of float8 weights, as DeepSeek, Qwen and vLLM's tools write them.
#
# Scales are numbers to multiply by: ``weight_scale`` for a whole matrix or each row,
# ``weight_scale_inv`` for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3).


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
