"""A checkpoint: a directory in Hugging Face's layout, or a GGUF file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from os import PathLike
from os.path import isfile  # unlike Path.is_file, for names that no file can have, too
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from opweave import platforms
from opweave.layers.linear_methods import LinearMethod
from opweave.platforms.base import UnsupportedByPlatformError
from opweave_engine.errors import CheckpointError, SamplingParamsError, require
from opweave_engine.load.gguf import has_json, is_gguf, json_of, read_gguf
from opweave_engine.models import CheckpointModel, build_model
from opweave_engine.models.config import Fields
from opweave_engine.models.weights import shown_name, shown_names
from opweave_engine.sampling.params import SamplingParams

# Where a model's weights come from: named tensors, some of them quantized.


Shapes = dict[str, tuple[int, ...]]  # of tensors, by name


class TensorSource(Protocol):
    """Named tensors, as the model's checkpoints in Hugging Face's format name them."""

    @property
    def file(self) -> Path:
        """The file, for errors."""

    def shapes(self) -> Shapes:
        """Return the shape of every tensor, by name, without reading one."""

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; a quantized one is dequantized."""


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """Tensors of which some are quantized."""

    @property
    def methods(self) -> Mapping[str, LinearMethod]:
        """How a linear layer keeps each quantized weight, by the name of the module."""

    def parameters(self, module: str, method: LinearMethod) -> dict[str, Tensor]:
        """Return the parameters of a module of ``methods``, by the names that *method* uses.

        Args:
            module: its name.
            method: that of ``methods``, or the form of it that the layer keeps.
        """


# Dtypes and shapes of a checkpoint's tensors.


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_dtype(dtype: str, config: Mapping[str, Any]) -> torch.dtype | None:
    """Return *dtype*, or the configuration's; None if neither says one."""
    saved = Fields(config).dtype()
    if dtype != "auto":
        return DTYPES[dtype]
    if saved is not None and saved not in DTYPES:
        raise CheckpointError(
            f"config.json has dtype {saved!r}, which dtype='auto' cannot follow. "
            f"Choose one of: {', '.join(DTYPES)}."
        )
    return None if saved is None else DTYPES[saved]


def dtype_of(files: Iterable[TensorSource]) -> torch.dtype:
    """Return the dtype of a tensor, where models can be loaded in it."""
    for file in files:
        for name in list(file.shapes())[:1]:
            if (dtype := file.tensor(name).dtype) in DTYPES.values():
                return dtype
    return torch.float32


def dtypes_of(files: Iterable[TensorFile]) -> dict[str, str]:
    """Return the dtype of every tensor as the format of safetensors calls it, by name."""
    return {name: dtype for file in files for name, dtype in file.dtypes().items()}


def shapes_of(files: Iterable[TensorSource]) -> Shapes:
    """Return the shape of every tensor, by name, if each is in one file only."""
    shapes: Shapes = {}
    holders: dict[str, Path] = {}
    for file in files:
        for name, shape in file.shapes().items():
            if name in shapes:
                raise CheckpointError(
                    f"{holders[name]} and {file.file} both hold the tensor {shown_name(name)}; "
                    "which one counts is not known. Download or copy the checkpoint again."
                )
            shapes[name], holders[name] = shape, file.file
    return shapes


# The files of a checkpoint.


# Called with the number of tensors loaded so far and in total.
Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def checkpoint_path(model: object) -> Path:
    """Return the path of *model*; the id of a repository on the Hugging Face hub is downloaded.

    A path that exists comes first.

    Raises:
        CheckpointError: *model* is not a path, or cannot be downloaded.
    """
    path = _local(model)
    is_id = _HUB_ID.fullmatch(str(model)) and not is_gguf(path)
    return _downloaded(str(model)) if is_id and not path.exists() else path


def checkpoint_name(model: object) -> str:
    """Return the name by which clients ask for *model*: of its directory, or its id on the hub.

    Raises:
        CheckpointError: *model* is not a path.
    """
    return path.resolve().name if (path := _local(model)).exists() else str(model)


def _local(model: object) -> Path:
    if not isinstance(model, str | PathLike):
        raise CheckpointError(
            f"The model is {model!r}; it must be the name of a checkpoint's directory or GGUF file."
        )
    return Path(model).expanduser()


@cache
def _downloaded(repository: str) -> Path:
    from huggingface_hub import snapshot_download  # imports an HTTP client

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:  # of the network, the repository or the disk
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repository!r} is not a directory, and it cannot be downloaded from the Hugging Face "
            f"hub: {reason.rstrip('.')}. Give the directory of a checkpoint, with config.json, "
            "tokenizer.json and safetensors files; or a GGUF file; or, where the hub is reachable, "
            f"run: hf download {repository} --local-dir {repository.rpartition('/')[2]}"
        ) from error


class Checkpoint:
    """The directory or GGUF file *path*, or a repository on the Hugging Face hub.

    Attributes:
        path: of the directory or file.
        gguf: the contents of the file; None for a directory.

    Raises:
        CheckpointError: there is no such directory, or the file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = checkpoint_path(path)
        self.gguf = read_gguf(self.path) if is_gguf(self.path) else None
        if self.gguf is None and not self.path.is_dir():
            kind = "GGUF file" if self.path.is_file() else "directory"
            raise CheckpointError(
                f"{str(path)!r} is not a {kind}. Give the directory of a checkpoint, with "
                "config.json, tokenizer.json and safetensors files; or a GGUF file."
            )

    def has(self, name: str) -> bool:
        """Return whether there is a file *name*, or a GGUF file that provides it."""
        if self.gguf is not None:
            return has_json(self.gguf, name)
        return (self.path / name).exists()

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in file *name*, or None if there is no such file.

        Raises:
            CheckpointError: the file does not hold a JSON object.
        """
        if self.gguf is not None:
            return json_of(self.gguf, name)
        if not self._has(name):
            return None
        value = self._json(name)
        if not isinstance(value, dict):
            kind = "null" if value is None else type(value).__name__
            raise CheckpointError(f"{self.path / name} must hold a JSON object, not {kind}.")
        return value

    def json_list(self, name: str) -> list[dict[str, Any]] | None:
        """Return the list of objects in file *name*, or None if there is no such file.

        Raises:
            CheckpointError: the file does not hold a JSON list of objects.
        """
        if self.gguf is not None or not self._has(name):
            return None
        value = self._json(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise CheckpointError(f"{self.path / name} must hold a JSON list of objects.")
        return value

    def config(self) -> dict[str, Any]:
        """Return the object in ``config.json``.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        config = self.json("config.json")
        if config is None:
            files = sorted(self.path.glob("*.gguf"))
            gguf = f" Give the GGUF file itself, such as {str(files[0])!r}." if files else ""
            raise CheckpointError(
                f"{self.path} has no config.json. It holds: {self._listing()}.{gguf}"
            )
        return config

    def tensor_files(self) -> list[Path]:
        """Return the safetensors files: the single one, or those that the index names.

        Raises:
            CheckpointError: no file exists, or the index is damaged or names a missing file.
        """
        if self._has(_SINGLE):
            return [self.path / _SINGLE]
        names = sorted(set(self._weight_map().values()))
        if missing := [name for name in names if not isfile(self.path / name)]:
            raise CheckpointError(
                f"{self.path / _INDEX} names files that are missing: {shown_names(missing)}."
            )
        return [self.path / name for name in names]

    @contextmanager
    def open_files(self) -> Iterator[list[TensorFile]]:
        """Open the safetensors files; a GGUF file has none.

        Raises:
            CheckpointError: as for :meth:`tensor_files`; or a file is damaged.
        """
        with ExitStack() as stack:
            files = [] if self.gguf is not None else self.tensor_files()
            yield [stack.enter_context(TensorFile(file)) for file in files]

    def check_index(self, tensors: Collection[str], *, optional: str | None = None) -> None:
        """Check that the files hold every tensor of the index; a single file has no index.

        Args:
            tensors: the names of the tensors in the files.
            optional: a tensor whose absence is only logged.

        Raises:
            CheckpointError: the index names a missing tensor.
        """
        if self.gguf is not None or self._has(_SINGLE):
            return
        lost = [name for name in self._weight_map() if name not in tensors]
        if optional in lost:
            lost.remove(optional)
            _log.warning(
                "%s names %s, which no file has; the model does not need it",
                self.path / _INDEX, optional,
            )  # fmt: skip
        if lost:
            raise CheckpointError(
                f"{self.path / _INDEX} names tensors that no file has: {shown_names(lost)}. "
                "Download or copy the checkpoint again."
            )

    def _weight_map(self) -> dict[str, str]:
        """Return the file of each tensor, as the index says."""
        index = self.json(_INDEX)
        if index is None:
            raise CheckpointError(
                f"{self.path} has neither {_SINGLE} nor {_INDEX}. It holds: {self._listing()}."
            )
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise CheckpointError(
                f"{self.path / _INDEX} has no 'weight_map' from tensors to files."
            )
        for name in set(files.values()):
            self.inside(name, _INDEX)
        return files

    def inside(self, name: str, source: str) -> Path:
        """Return the path of *name*, which the file *source* names.

        Links are followed: the cache of the hub consists of them.

        Raises:
            CheckpointError: it names a place outside of the checkpoint.
        """
        posix, windows = PurePosixPath(name), PureWindowsPath(name)
        if posix.is_absolute() or windows.anchor or ".." in (*posix.parts, *windows.parts):
            raise CheckpointError(
                f"{self.path / source} names {shown_name(name)}, which is outside of the "
                "checkpoint; names must be relative and without '..'. Copy the file into the "
                "directory, and correct the name."
            )
        return self.path / name

    def _has(self, name: str) -> bool:
        """Return whether *name* exists; if it exists and is not a regular file, raise an error."""
        file = self.path / name
        if file.is_file():
            return True
        if file.exists():
            kind = "a directory" if file.is_dir() else "something else"
            raise CheckpointError(f"{file} must be a file, but is {kind}.")
        if file.is_symlink():
            raise CheckpointError(
                f"{file} is a link to {str(file.readlink())!r}, which does not exist."
            )
        return False

    def _json(self, name: str) -> Any:
        file = self.path / name
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if is_deep else error
            raise CheckpointError(f"{file} is not readable JSON: {reason}.") from error

    def _listing(self) -> str:
        return shown_names(sorted(file.name for file in self.path.iterdir())) or "nothing"


class TensorFile:
    """One safetensors file, mapped into memory; use it as a context manager.

    Raises:
        CheckpointError: the file is truncated or damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        safe_open = require("safetensors").safe_open
        try:
            self._handle = safe_open(file, framework="pt", device="cpu")
        except Exception as error:
            raise CheckpointError(
                f"{file} is damaged or cut short ({error}). Download or copy it again."
            ) from error

    def __enter__(self) -> TensorFile:
        self._handle.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.__exit__(*exception)

    def shapes(self) -> Shapes:
        """Return the shape of every tensor, by name; reads no tensor."""
        names: list[str] = self._handle.keys()
        return {name: tuple(self._handle.get_slice(name).get_shape()) for name in names}

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor as the format calls it, by name; reads no tensor."""
        return {name: self._handle.get_slice(name).get_dtype() for name in self.shapes()}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor


# Build models of configurations that may be damaged.


MAX_LAYERS = 4096  # limit for models that are built before the layers in the files are counted
# Experts and extra layers are built one by one, and a head has a table of its size.
_MAX_SIZE = 2**16
_LIMITED_SUFFIXES = ("experts", "predict_layers", "head_dim")
# Model parameters per checkpoint element; below it, an error lists the tensors that do not match.
_MAX_PARAMETER_RATIO = 8
# The meaning of parts of torch's error messages, which have no classes of their own.
_TOO_LARGE = {
    "verflow": "names sizes that no tensor has",
    "DefaultCPUAllocator": "asks for more memory than there is",
}


def check_layers(config: Mapping[str, Any], most: int, subject: str) -> None:
    """Raise CheckpointError if a model has more layers than *most*.

    Args:
        config: the object in ``config.json``.
        most: the limit.
        subject: its name in the message, with a verb.
    """
    if (layers := num_layers(config)) > most:  # they would be built one by one
        raise CheckpointError(f"config.json says num_hidden_layers={layers}, but {subject} {most}.")


def num_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers a configuration asks for; 0 if it does not say."""
    layers = _language_model(config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")  # models that also see images have one
    return text if isinstance(text, Mapping) else config


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a model has more experts or larger heads than there can be."""
    for name, size in _language_model(config).items():
        is_limited = name.endswith(_LIMITED_SUFFIXES) and isinstance(size, int)
        if is_limited and size > _MAX_SIZE:
            raise CheckpointError(f"config.json says {name}={size}, but there can be {_MAX_SIZE}.")


def check_parameters(planned: nn.Module, held: int) -> None:
    """Raise CheckpointError if a model has far more parameters than a checkpoint.

    Args:
        planned: the model, without memory for its weights.
        held: the number of elements of the checkpoint's tensors.
    """
    count = sum(parameter.numel() for parameter in planned.parameters())
    if count > held * _MAX_PARAMETER_RATIO + _MAX_SIZE * _MAX_PARAMETER_RATIO:
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
        fault = next((_TOO_LARGE[sign] for sign in _TOO_LARGE if sign in text), None)
        if fault is None:
            raise
        reason = text.rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
        raise CheckpointError(f"config.json {fault}: {reason}.") from error


# Sampling defaults from ``generation_config.json``.


FILE = "generation_config.json"
_NO_DEFAULTS = ("none", "vllm")  # vLLM's name for its own defaults is "vllm"
# The names in the file, and those of SamplingParams.
_FOLLOWED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
# Other fields that change what transformers generates, and the values that do not.
_NOT_FOLLOWED: Mapping[str, tuple[object, ...]] = {
    "do_sample": (True,), "num_beams": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "typical_p": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (), "penalty_alpha": (0,),
    "guidance_scale": (1,), "min_length": (0,), "min_new_tokens": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ({}, []),
    "stop_strings": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}  # fmt: skip


def generation_folder(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """Return the directory whose ``generation_config.json`` counts.

    Args:
        checkpoint: of the model.
        source: ``EngineConfig.generation_config``.

    Raises:
        CheckpointError: *source* is not a directory with that file.
    """
    if source == "auto" or source in _NO_DEFAULTS:
        return checkpoint
    folder = Checkpoint(source)
    if folder.json(FILE) is None:
        raise CheckpointError(
            f"generation_config={source!r} has no {FILE}. Give a directory that has it, 'auto' for "
            "the checkpoint's, or 'none'."
        )
    return folder


def sampling_defaults(checkpoint: Checkpoint, source: str = "auto") -> dict[str, Any]:
    """Return the sampling parameters that ``generation_config.json`` sets, by their name.

    Args:
        checkpoint: of the model.
        source: ``"auto"`` for the file in *checkpoint*, ``"none"`` for no defaults, or a directory
            with another such file.

    Raises:
        CheckpointError: the file is damaged or missing, or a value is out of range.
    """
    if source in _NO_DEFAULTS:
        return {}
    folder = generation_folder(checkpoint, source)
    fields = folder.json(FILE) or {}
    values = {name: fields[key] for key, name in _FOLLOWED.items() if fields.get(key) is not None}
    try:
        SamplingParams(**values)
    except SamplingParamsError as error:
        raise CheckpointError(
            f"{folder.path / FILE} has a wrong value: {error} Correct it, or do without the file's "
            "defaults (--generation-config none)."
        ) from error
    return values


def log_defaults(checkpoint: Checkpoint, source: str, defaults: Mapping[str, Any]) -> None:
    """Log the sampling defaults, and the fields of the file that are not followed."""
    if source in _NO_DEFAULTS:
        return
    folder = generation_folder(checkpoint, source)
    # Defaults of SamplingParams change nothing.
    neutral = SamplingParams()
    if changed := {k: v for k, v in defaults.items() if v != getattr(neutral, k)}:
        _log.warning(
            "sampling defaults from %s: %s; requests override them, and "
            "generation_config='none' (--generation-config none) disables them",
            folder.path / FILE, _listed(changed),
        )  # fmt: skip
    fields = folder.json(FILE) or {}
    values = {name: fields[name] for name in _NOT_FOLLOWED if fields.get(name) is not None}
    if ignored := {k: v for k, v in values.items() if v not in _NOT_FOLLOWED[k]}:
        _log.warning("%s: not followed: %s", folder.path / FILE, _listed(ignored))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
