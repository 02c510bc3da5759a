"""Writes a checkpoint with int4 weights, in the format of compressed-tensors."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opweave.layers.linear import LinearBase, ReplicatedLinear
from opweave_engine.errors import CheckpointError, InvalidArgumentError, require
from opweave_engine.load.checkpoint import Checkpoint, Progress, Shapes, shapes_of
from opweave_engine.load.loader import as_language_model, check_shapes, planned_model
from opweave_engine.load.quantized import (
    FLOATS,
    part_names,
    quantization_errors,
    require_unquantized,
)
from opweave_engine.models import CausalLM, LanguageModel
from opweave_engine.models.weights import shown_name

# Makes a directory whose files appear only when all of them are complete.


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to write to; it becomes *path* if no error is raised.

    An empty directory *path* is kept and filled, because it may be a mount point, the current
    directory, or the target of a link.

    Args:
        path: missing, or an empty directory.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    into = path.resolve()
    is_empty = into.is_dir()
    parent = into if is_empty else into.parent
    new_parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    partial = parent / f".{into.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if is_empty:
            for file in sorted(partial.iterdir()):
                file.rename(into / file.name)
        else:
            partial.rename(into)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            for folder in new_parents:
                folder.rmdir()
        # Errors while writing data do not name the file.
        name = error.filename if isinstance(error, OSError) else None
        folders = (partial, *new_parents)
        is_within = name is None or any(Path(str(name)).is_relative_to(f) for f in folders)
        if isinstance(error, OSError) and is_within:
            raise InvalidArgumentError(
                f"{str(path)!r} cannot be written: {error.strerror or error}."
            ) from error
        raise
    else:
        shutil.rmtree(partial, ignore_errors=True)


# Rounds a matrix to int4 in groups, in the layout of compressed-tensors' pack-quantized.


_MIN_INT4, _MAX_INT4 = -8, 7
# Scales that are tried for each group, as shares of the one that clips nothing.
_SCALE_SHARES = tuple(1 - 0.025 * step for step in range(11))
_ROWS_AT_ONCE = 1024  # rounded at once, so that intermediate results stay small


def quantized_int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Return the tensors of a symmetric int4 matrix, by the last part of their names.

    Numbers are rounded to the nearest. The scale of a group is the one of a few that gives the
    least squared error, because clipping the largest number often pays (arXiv:1902.01917).

    Args:
        weight: ``(out, in)``, float32, float16 or bfloat16; finite.
        group: numbers in a row that share a scale; it divides the inputs, and 8 divides it.
    """
    parts = [_rounded(rows, group) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    q, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    packed = q[:, ::2] | (q[:, 1::2] << 4)
    return {
        "weight_packed": packed.view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _rounded(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return numbers from 0 to 15, ``(out, in)``, and scales ``(out, in / group)``."""
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    whole = grouped.abs().amax(-1, keepdim=True) / _MAX_INT4
    best = torch.full_like(whole, torch.inf)
    q, scale = torch.zeros_like(grouped), torch.ones_like(whole)
    kind = torch.finfo(weight.dtype)
    # Scales of float16 may be subnormal, so that small weights are not rounded to zero.
    least = max(kind.tiny * kind.eps, torch.finfo(torch.float32).tiny)
    for share in _SCALE_SHARES:
        # The numbers are rounded for the scale as it is stored.
        tried = (whole * share).clamp(min=least).to(weight.dtype).float()
        rounded = (grouped / tried).round().clamp(_MIN_INT4, _MAX_INT4)
        error = (rounded * tried - grouped).square().sum(-1, keepdim=True)
        is_better = error < best
        q, scale = torch.where(is_better, rounded, q), torch.where(is_better, tried, scale)
        best = torch.where(is_better, error, best)
    numbers = (q - _MIN_INT4).to(torch.uint8).flatten(1)
    return numbers, scale.squeeze(-1).to(weight.dtype)


# The quantized checkpoint.


GROUPS = (32, 64, 128)
_INDEX = "model.safetensors.index.json"
_VERSION = "0.12.2"  # of compressed-tensors, whose layout is written
_ADVICE = "it cannot be quantized again."


@dataclass(frozen=True)
class Written:
    """A checkpoint that was quantized.

    Attributes:
        quantized: the modules whose weights have 4 bits.
        ignored: those with a matrix that is unchanged.
        bytes_before, bytes_after: of all tensors.
    """

    quantized: list[str]
    ignored: list[str]
    bytes_before: int
    bytes_after: int


def quantize_checkpoint(
    path: str | Path, into: Path, *, group: int = 64, progress: Progress | None = None
) -> Written:
    """Write the checkpoint in directory *path* with int4 weights to directory *into*.

    The weights of linear layers are quantized, but not embeddings, the output matrix, experts and
    their routers, or matrices whose inputs are not a multiple of *group*.

    Args:
        path: a checkpoint of a language model of opweave, not quantized.
        into: the directory to make, or an empty one; nothing is left there if an error is raised.
        group: weights in a row that share a scale, one of ``GROUPS``.
        progress: called with the number of tensors written so far and in total.

    Raises:
        CheckpointError, ModelError: the checkpoint is damaged, quantized or not supported.
        InvalidArgumentError: *group* is not supported, or *into* is not empty or not writable.
    """
    if group not in GROUPS:
        raise InvalidArgumentError(
            f"group={group!r} is not supported. Supported: {', '.join(map(str, GROUPS))}."
        )
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise InvalidArgumentError(f"{str(into)!r} exists already. Give a new directory.")
    checkpoint = Checkpoint(path)
    if checkpoint.gguf is not None:
        raise CheckpointError(
            f"{checkpoint.path} is a GGUF file. Give the directory of a checkpoint that is not "
            "quantized."
        )
    with new_directory(into) as partial:
        return _write(checkpoint, partial, group, progress or (lambda *_: None))


def _write(checkpoint: Checkpoint, into: Path, group: int, progress: Progress) -> Written:
    original = checkpoint.config()
    with checkpoint.open_files() as files:
        config = require_unquantized(original, checkpoint, files, _ADVICE)
        shapes = shapes_of(files)
        with quantization_errors(original, checkpoint, _ADVICE):
            model = as_language_model(planned_model(config, len(shapes)))
            check_shapes(model, shapes)
        chosen = _chosen(model, shapes, group)
        ignored = _ignored(model, shapes, chosen)
        sizes, places = [0, 0], dict[str, str]()
        done = 0
        for file in files:
            tensors: dict[str, Tensor] = {}
            for name in file.shapes():
                tensor, module = file.tensor(name), name.removesuffix(".weight")
                new = {name: tensor}
                if name in chosen:
                    parts = quantized_int4(_finite(name, tensor), group)
                    new = {f"{module}.{leaf}": part for leaf, part in parts.items()}
                sizes[0] += tensor.nbytes
                sizes[1] += sum(part.nbytes for part in new.values())
                tensors |= new
                done += 1
                progress(done, len(shapes))
            _save(tensors, into / file.file.name)
            places |= dict.fromkeys(tensors, file.file.name)
    if len(files) > 1:
        _dump(into / _INDEX, {"metadata": {"total_size": sizes[1]}, "weight_map": places})
    _copy_others(checkpoint.path, into)
    _dump(into / "config.json", {**config, "quantization_config": _config(group, ignored)})
    modules = [name.removesuffix(".weight") for name in chosen]
    return Written(modules, ignored, *sizes)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file; unlike the library, raise OSError if that fails."""
    try:
        require("safetensors.torch").save_file(tensors, file, metadata={"format": "pt"})
    except require("safetensors").SafetensorError as error:
        raise OSError(str(error)) from error


def _finite(name: str, weight: Tensor) -> Tensor:
    """Return *weight* in a dtype that scales may have.

    Raises:
        CheckpointError: it does not hold finite floating-point numbers of 16 bits or more.
    """
    if weight.dtype not in (*FLOATS, torch.float64):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{shown_name(name)} is {dtype}; weights to quantize must be float64, float32, "
            "float16 or bfloat16."
        )
    weight = weight.float() if weight.dtype is torch.float64 else weight
    if not bool(weight.isfinite().all()):
        raise CheckpointError(
            f"{shown_name(name)} has values that are infinite or not a number, which int4 cannot "
            "represent. The checkpoint is damaged."
        )
    return weight


def _chosen(model: LanguageModel, shapes: Shapes, group: int) -> dict[str, None]:
    """Return the names of the tensors to quantize, in order."""
    linear = {
        part
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase)
        and not isinstance(layer, ReplicatedLinear)
        and name.rpartition(".")[2] not in model.dense
        for part, _ in part_names(model, name)
    }
    return {
        name: None
        for name, shape in shapes.items()
        if name.endswith(".weight")
        and model.own_name(name.removesuffix(".weight")) in linear
        and shape[-1] % group == 0
    }


def _ignored(model: LanguageModel, shapes: Shapes, chosen: dict[str, None]) -> list[str]:
    """Return the modules with a matrix that is not quantized; readers take all others for int4."""
    embedding = model.embedding_name if isinstance(model, CausalLM) else None
    left = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and name not in chosen
        and model.own_name(name) != embedding
    ]
    return list(dict.fromkeys([*left, "lm_head"]))


def _copy_others(source: Path, into: Path) -> None:
    """Copy the tokenizer and all other files but weights and what is written already."""
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5")
        is_index = file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not is_index and file.name != "config.json":
            shutil.copyfile(file, into / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, into / templates.name)


def _config(group: int, ignored: list[str]) -> dict[str, Any]:
    """Return ``quantization_config`` as compressed-tensors writes it."""
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group,
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "version": _VERSION,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
    }


def _dump(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
