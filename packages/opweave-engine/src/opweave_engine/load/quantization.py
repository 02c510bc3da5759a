"""Recognizes quantized checkpoints, and keeps their weights quantized."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave import platforms
from opweave.layers import FusedMoE, ParallelLMHead, VocabParallelEmbedding
from opweave.layers.embedding import BlockEmbeddingMethod
from opweave.layers.linear import ColumnParallelLinear, LinearBase, LinearMethod
from opweave.layers.linear_methods import (
    BlockMethod,
    GroupedInt4Method,
    SeparatePartsMethod,
    UnquantizedLinearMethod,
    W8A8Method,
    deferred_weights,
)
from opweave.layers.moe import QuantizedFusedMoEMethod, UnquantizedFusedMoEMethod, experts_format
from opweave.platforms.base import UnsupportedByPlatformError
from opweave_engine.errors import CheckpointError
from opweave_engine.load.checkpoint import (
    Checkpoint,
    QuantizedSource,
    TensorFile,
    TensorSource,
    shapes_of,
)
from opweave_engine.load.matrix import QuantizedMatrix, Tensors
from opweave_engine.load.quantized_formats import Awq, BitsAndBytes, CompressedTensors, Fp8, Gptq
from opweave_engine.models import CausalLM, CheckpointModel, UnsupportedModelError, build_model
from opweave_engine.models.weights import shown_name

# Build models of configurations that may be damaged.


MOST_LAYERS = 4096  # of a model that is built before tensors say how many there are
# Of experts and extra layers, which are listed one by one, and of a head, which has a table.
_LARGEST = 2**16
_LIMITED = ("experts", "predict_layers", "head_dim")  # how their keys end
# Up to so many parameters per number in the files, tensors that do not fit are listed.
_SLACK = 8
# Parts of torch's error messages, which have no classes of their own -> their meaning.
_TOO_LARGE = {
    "verflow": "names sizes that no tensor has",
    "DefaultCPUAllocator": "asks for more memory than there is",
}


def check_layers(config: Mapping[str, Any], most: int, what: str) -> None:
    """Raise CheckpointError if a model has more layers than *most*.

    Args:
        config: the object in ``config.json``.
        most: the limit.
        what: its name in the message, with a verb.
    """
    if (layers := num_layers(config)) > most:  # they would be built one by one
        raise CheckpointError(f"config.json says num_hidden_layers={layers}, but {what} {most}.")


def num_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers a configuration asks for; 0 if it does not say."""
    layers = _language_model(config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")  # of models that also see images
    return text if isinstance(text, Mapping) else config


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a model has more experts or larger heads than there can be."""
    for name, size in _language_model(config).items():
        is_limited = name.endswith(_LIMITED) and isinstance(size, int)
        if is_limited and size > _LARGEST:
            raise CheckpointError(f"config.json says {name}={size}, but there can be {_LARGEST}.")


def check_parameters(planned: nn.Module, held: int) -> None:
    """Raise CheckpointError if a model has far more parameters than a checkpoint.

    Args:
        planned: the model, without memory for its weights.
        held: the number of elements of the checkpoint's tensors.
    """
    count = sum(parameter.numel() for parameter in planned.parameters())
    if count > held * _SLACK + _LARGEST * _SLACK:
        raise CheckpointError(
            f"config.json describes a model of {count:,} parameters, but the files hold {held:,}. "
            "It does not belong to them, or is damaged."
        )


def check_memory(planned: nn.Module, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a model's weights and tables exceed the memory of the device.

    Args:
        planned: the model, without memory for its weights, in any dtype.
        dtype: in which it is to be built.
    """
    needed = sum(tensor.numel() for tensor in [*planned.parameters(), *planned.buffers()])
    needed *= dtype.itemsize
    try:
        total = platforms.current_platform.memory_info()[1]
    except UnsupportedByPlatformError:  # the allocation of the weights fails then
        return
    if needed > total:
        raise CheckpointError(
            f"config.json asks for more memory than there is: the model takes {needed:,} bytes, "
            f"and the device has {total:,}."
        )


def build(config: Mapping[str, Any], dtype: torch.dtype) -> CheckpointModel:
    """Build the model of opweave that a configuration describes; weights are not set.

    Raises:
        CheckpointError: its sizes are too large for tensors, or for the memory.
        ModelError: it is invalid or not supported.
    """
    check_sizes(config)
    try:
        return build_model(config, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        what = next((_TOO_LARGE[sign] for sign in _TOO_LARGE if sign in text), None)
        if what is None:
            raise
        reason = text.rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
        raise CheckpointError(f"config.json {what}: {reason}.") from error


# The tensors of a quantized checkpoint, matrix by matrix.


class Format(Protocol):
    """How checkpoints of a kind store their matrices.

    Attributes:
        main: the last parts of names, of which each quantized module has one.
        leaves: of all tensors that belong to a quantized matrix.
        values_needed: of tensors whose values decide how a layer keeps the matrix.
        notes: what of the configuration is not followed, for the log.
    """

    @property
    def main(self) -> Sequence[str]: ...
    @property
    def leaves(self) -> Sequence[str]: ...
    @property
    def values_needed(self) -> Sequence[str]: ...
    @property
    def notes(self) -> Sequence[str]: ...

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module*; without values, for tensors on the device "meta".

        Raises:
            CheckpointError: tensors are missing or do not fit each other.
        """


class QuantizedFiles:
    """A checkpoint's files: a :class:`~opweave_engine.load.checkpoint.QuantizedSource`.

    Args:
        files: open.
        form: how they store matrices.

    Raises:
        CheckpointError: tensors are missing or do not fit each other.
    """

    def __init__(self, files: Sequence[TensorFile], form: Format) -> None:
        self._form = form
        shapes_of(files)  # each tensor is in one file only
        self._files = {name: file for file in files for name in file.shapes()}
        self._dtypes = {name: dtype for file in files for name, dtype in file.dtypes().items()}
        self._modules = self._find()
        self.file: Path = files[0].file
        known = {n: s for file in files for n, s in file.shapes().items()}
        planned = {
            module: form.matrix(module, self._planned(names, known))
            for module, names in self._modules.items()
        }
        self.methods: Mapping[str, LinearMethod] = {
            module: matrix.method for module, matrix in planned.items() if matrix.method is not None
        }
        used = {name for names in self._modules.values() for name in names.values()}
        self._shapes = {name: shape for name, shape in known.items() if name not in used}
        self._shapes |= {f"{module}.weight": matrix.shape for module, matrix in planned.items()}

    @property
    def num_dense(self) -> int:
        """The number of quantized matrices that no layer keeps quantized."""
        return len(self._modules) - len(self.methods)

    def shapes(self) -> dict[str, tuple[int, ...]]:
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

    def _find(self) -> dict[str, dict[str, str]]:
        """Return the tensors of each quantized module, by the last part of their names."""
        found: dict[str, dict[str, str]] = {}
        for name, dtype in self._dtypes.items():
            module, leaf = _split(name)
            is_narrow = leaf == "weight" and dtype in ("I8", "F8_E4M3")
            if leaf in self._form.main or is_narrow:
                found[module] = {}
        for name in self._dtypes:
            module, leaf = _split(name)
            if module in found and leaf in self._form.leaves:
                found[module][leaf] = name
        return found

    def _planned(
        self, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return tensors without values, where those are not needed."""
        return {
            leaf: self._files[name].tensor(name)
            if leaf in self._form.values_needed
            else torch.empty(shapes[name], dtype=_TORCH[self._dtypes[name]], device="meta")
            for leaf, name in names.items()
        }


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and its name there, such as ``weight.absmax``."""
    module, dot, leaf = name.partition(".weight.")
    if dot:
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module, leaf


_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


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
    found = {methods.get(name) for name in names}
    method = found.pop()
    return None if found or experts_format(method) is None else method


# Builds models whose linear layers keep the weights of a checkpoint quantized.


_log = logging.getLogger(__name__)


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
    own = {model.own_name(name): method for name, method in methods.items()}
    kept: dict[str, LinearMethod] = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LinearBase):
            parts = dict(part_names(model, name))
            layer.prefix = layer.prefix or name  # for errors
            found = {} if name.rpartition(".")[2] in model.dense else own
            method = _method(layer, parts, found)
            layer.set_quant_method(method)
            for part in parts:
                if part in found:
                    kept[names[part]] = _of_part(method, part)
        elif isinstance(layer, FusedMoE):
            of_experts = set_experts(model, name, layer, own)
            kept |= {names[part]: method for part, method in of_experts.items()}
    kept |= {names[name]: own[name] for name in _set_tables(model, own)}
    model.requires_grad_(False)
    if left := methods.keys() - kept:
        kinds = Counter(name.rpartition(".")[2] for name in left)
        _log.warning(
            "%d quantized weights are dequantized to %s while they are loaded, because their "
            "layers have no quantized form: %s",
            len(left), str(dtype).removeprefix("torch."),
            ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())),
        )  # fmt: skip
    return model, kept


def _of_part(method: LinearMethod, part: str) -> LinearMethod:
    """Return the method of a part of a layer, by what checkpoints call it."""
    if isinstance(method, SeparatePartsMethod):
        return method.methods[part.rpartition(".")[2]]
    return method


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
    own = [m and for_outputs(m, [size]) for m, size in zip(chosen, sizes, strict=True)]
    return SeparatePartsMethod(dict(zip(shards, own, strict=True)), shards)


# Recognizes quantized checkpoints, and the formats that are supported.
#
# The tensors decide: a configuration left over from quantization does no harm to plain weights.


# Keys of config.json: of most formats, of older compressed-tensors, and of MLX.
_KEYS = ("quantization_config", "compression_config", "quantization")
# Files of GPTQ, AWQ and ModelOpt.
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_PLAIN = ("F64", "F32", "F16", "BF16")
# How names end in GPTQ and AWQ, compressed-tensors and fp8, bitsandbytes, mxfp4, and MLX.
_PACKED = (
    *(".qweight", ".qzeros", ".g_idx"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
    *(".weight_shape", ".input_scale", ".weight_scale_2"),
    *(".SCB", ".weight_format", ".absmax", ".quant_map", ".nested_absmax"),
    *("_blocks", "proj_scales"),
    *(".scales", ".biases"),
)
_CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *("k_proj.output_scale", "v_proj.output_scale"),  # of older compressed-tensors
)


# Methods that quantize weights while the model runs, and may store them unquantized.
_ONLINE = ("bitnet",)

# By quant_method.
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "bitsandbytes": BitsAndBytes,
}

_SUPPORTED = (
    "quantized checkpoints are not supported in this form. Supported, by opweave's own models: "
    f"quant_method {', '.join(FORMATS)} in config.json, and GGUF files."
)


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor scales a quantized KV cache, and means nothing to another one."""
    return name.endswith(_CACHE_SCALES)


def opened(
    config: Mapping[str, Any], checkpoint: Checkpoint, files: Sequence[TensorFile]
) -> tuple[dict[str, Any], list[TensorSource]]:
    """Return *config* without the keys of quantization, and the tensors of *files*.

    Raises:
        UnsupportedModelError: the weights have a quantized format that is not supported.
        CheckpointError: quantized weights are incomplete or do not fit each other.
    """
    given = _given(config)
    method = str(given.get("quant_method"))
    is_quantized = any(
        name.endswith(_PACKED) or _is_narrow(name, dtype) for name, dtype in _dtypes(files).items()
    )
    if method not in FORMATS or not is_quantized:
        return unquantized(config, checkpoint, files), [*files]
    form = FORMATS[method](given)
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


def unquantized(
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    files: Sequence[TensorFile],
    advice: str = _SUPPORTED,
) -> dict[str, Any]:
    """Return *config* without the keys of quantization; no tensor shows a format of it.

    Args:
        config: the object in ``config.json``.
        checkpoint: the checkpoint.
        files: its tensors.
        advice: the end of the error for quantized weights.

    Raises:
        UnsupportedModelError: the weights are quantized.
    """
    named = _named(config, checkpoint)
    dtypes = _dtypes(files)
    packed = next((name for name in dtypes if name.endswith(_PACKED)), None)
    narrow = next((name for name, dtype in dtypes.items() if _is_narrow(name, dtype)), None)
    if packed is not None or (narrow is not None and named is not None):
        signs = [named, f"the tensor {shown_name(packed or narrow or '')}"]
        raise UnsupportedModelError(
            f"{checkpoint.path} holds quantized weights ({', '.join(filter(None, signs))}); "
            f"{advice}"
        )
    _warn_of_cache(config, checkpoint, files)
    return without_quantization(config)


@contextmanager
def plain_weights(
    config: Mapping[str, Any], checkpoint: Checkpoint, advice: str = _SUPPORTED
) -> Iterator[None]:
    """Check that weights are not quantized: inside, tensors are compared to the plain model.

    Formats differ in the names of their tensors, so that only a tensor that does not fit shows an
    unknown one. If all fit, it is logged that the configuration of quantization is ignored.

    Args:
        config, checkpoint, advice: as for :func:`unquantized`.

    Raises:
        UnsupportedModelError: tensors do not fit, and a format of quantization is named; or it
            quantizes weights while the model runs.
    """
    named = _named(config, checkpoint)
    if str(_given(config).get("quant_method")) in _ONLINE:
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
    if scales := sum(map(is_cache_scale, _dtypes(files))):
        what = f"{scales} scales of a quantized KV cache are"
    elif _given(config).get("kv_cache_scheme"):
        what = "kv_cache_scheme is"
    else:
        return
    _log.warning("%s: %s ignored: the cache is not quantized", checkpoint.path, what)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return *config* without the keys of quantization."""
    return {key: value for key, value in config.items() if key not in _KEYS}


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the configuration of quantization; an empty one if it is missing."""
    objects = (config.get(key) for key in _KEYS[:2])
    return next((each for each in objects if isinstance(each, Mapping)), {})


def _named(config: Mapping[str, Any], checkpoint: Checkpoint) -> str | None:
    """Return what names a format of quantization, for a message; or None."""
    for key in _KEYS:
        if found := config.get(key):
            method = found.get("quant_method") if isinstance(found, Mapping) else found
            return f"{key!r} in config.json with quant_method {method!r}"[:200]
    return next((name for name in _FILES if (checkpoint.path / name).is_file()), None)


def _dtypes(files: Sequence[TensorFile]) -> dict[str, str]:
    return {name: dtype for file in files for name, dtype in file.dtypes().items()}


def _is_narrow(name: str, dtype: str) -> bool:
    """Whether it is a matrix of other than floating-point numbers of 16 bits or more."""
    return dtype not in _PLAIN and name.endswith(("weight", "_proj"))
