"""Recognizes quantized checkpoints, and the formats that are supported.

The tensors decide: a configuration left over from quantization does no harm to plain weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.checkpoint import Checkpoint, TensorFile
from opweave_engine.loading.quantized.awq import Awq
from opweave_engine.loading.quantized.bitsandbytes import BitsAndBytes
from opweave_engine.loading.quantized.compressed_tensors import CompressedTensors
from opweave_engine.loading.quantized.files import Format, QuantizedFiles
from opweave_engine.loading.quantized.fp8 import Fp8
from opweave_engine.loading.quantized.gptq import Gptq
from opweave_engine.loading.sources import TensorSource
from opweave_engine.models import UnsupportedModelError
from opweave_engine.models.weights import shown_name

_log = logging.getLogger(__name__)

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
