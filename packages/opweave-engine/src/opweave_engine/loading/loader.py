"""Loads any registered model, strictly: every weight is found, and nothing else is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from opweave.config.engine import LoadFormat, ModelImpl
from opweave.layers.linear import LinearMethod
from opweave.layers.parallel import ALONE, TensorParallel, tensor_parallel
from opweave_engine.errors import CheckpointError, InvalidArgumentError
from opweave_engine.loading import huge_pages
from opweave_engine.loading.build import (
    MOST_LAYERS,
    build,
    check_layers,
    check_memory,
)
from opweave_engine.loading.checkpoint import Checkpoint, Progress, TensorFile
from opweave_engine.loading.dtypes import DTYPES, dtype_of, named_dtype, shapes_of
from opweave_engine.loading.gguf.tensors import GgufTensors
from opweave_engine.loading.implementation import uses_transformers
from opweave_engine.loading.quantization import (
    is_cache_scale,
    opened,
    plain_weights,
    without_quantization,
)
from opweave_engine.loading.quantized.layers import build_quantized
from opweave_engine.loading.sources import QuantizedSource, TensorSource
from opweave_engine.loading.tied_head import head_name, untied
from opweave_engine.loading.transformers_checkpoint import load_by_transformers
from opweave_engine.models import (
    CheckpointModel,
    LanguageModel,
    UnsupportedModelError,
    WeightsError,
    model_class,
)
from opweave_engine.models.rope_config import warn_unread_rope_keys
from opweave_engine.transformers import check_transformers_ranks, load_transformers_model


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    load_format: LoadFormat = "auto",
    model_impl: ModelImpl = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> CheckpointModel:
    """Build the model in the directory *path* and load its weights.

    It is on torch's default device; inside a :func:`~opweave.layers.parallel.tensor_parallel`
    block, it is one rank's part.

    Args:
        path: with ``config.json`` and safetensors files, sharded or not.
        dtype: ``"auto"`` for the checkpoint's, or one of ``DTYPES``: weights are cast to it.
        load_format: ``"auto"`` reads the safetensors files; ``"dummy"`` reads nothing but
            ``config.json``, and makes weights up: small random numbers.
        model_impl: as in :class:`~opweave.config.EngineConfig`.
        seed: of dummy weights.
        progress: called with the number of tensors loaded so far and in total.

    Raises:
        CheckpointError: a file is missing or damaged; or tensors are missing, unexpected or do not
            fit, in which case the message lists them together.
        InvalidArgumentError: *dtype* or *load_format* is something else.
        ModelError: the configuration is invalid or not supported.
    """
    dtype = check_dtype(dtype)
    check_load_format(load_format)
    checkpoint = Checkpoint(path)
    config = checkpoint.config()
    # First: errors in the configuration are reported before missing files.
    if uses_transformers(config, model_impl):
        seed_of_weights = seed if load_format == "dummy" else None
        load = load_transformers_model
        return load_by_transformers(load, checkpoint, dtype, seed_of_weights, progress)
    warn_unread_rope_keys(config)
    named = named_dtype(dtype, config)
    if load_format == "dummy":
        check_layers(config, MOST_LAYERS, "there can be")
        weight_dtype = named or torch.float32
        with torch.device("meta"):
            check_memory(build(config, weight_dtype), weight_dtype)
        model = build(config, weight_dtype)
        huge_pages.move_parameters(model)
        model.fill_randomly(seed)
        return model.eval()
    with ExitStack() as stack:
        fit: AbstractContextManager[None] = nullcontext()
        if checkpoint.gguf is None:
            files = [stack.enter_context(TensorFile(file)) for file in checkpoint.tensor_files()]
            original = config
            config, sources = opened(original, checkpoint, files)
            if sources == files:
                fit = plain_weights(original, checkpoint)
        else:
            planned = planned_model(config, len(checkpoint.gguf.tensors))
            sources = [GgufTensors(checkpoint.gguf, planned)]
            files = []
        shapes = shapes_of(sources)
        with fit:
            planned = planned_model(config, len(shapes))
            checkpoint.check_index(shapes_of(files), optional=head_name(planned))
            check_shapes(planned, {n: s for n, s in shapes.items() if not is_cache_scale(n)})
        kept = named or dtype_of(sources)
        model, packed = build_quantized(untied(config, planned, sources, kept), kept, sources)
        huge_pages.move_parameters(model)
        _fill(model, _tensors(sources, packed, progress or (lambda *_: None)))
    return model.eval()


def check_ranks(path: str | Path, size: int, model_impl: ModelImpl = "auto") -> None:
    """Build one rank's part of the model in directory *path*, without memory for its weights.

    Args:
        path: of the checkpoint.
        size: how many ranks there are.
        model_impl: as in :class:`~opweave.config.EngineConfig`.

    Raises:
        ShardingError: it cannot be divided over *size* tensor-parallel ranks.
        CheckpointError: ``config.json`` is missing or damaged.
        ModelError: the configuration is invalid or not supported.
    """
    config = without_quantization(Checkpoint(path).config())
    check_layers(config, MOST_LAYERS, "there can be")
    if uses_transformers(config, model_impl):
        check_transformers_ranks(Path(path), config, size)
        return
    model_class(config)
    rank = TensorParallel(0, size, _not_called, _not_called)
    with torch.device("meta"), tensor_parallel(rank):
        build(config, torch.float32)


def _not_called(x: Tensor, dim: int = -1) -> Tensor:
    raise AssertionError("a model that is only built needs no other ranks")


def as_language_model(model: CheckpointModel) -> LanguageModel:
    """Return *model*, which predicts the next token.

    Raises:
        UnsupportedModelError: it does not.
    """
    if not isinstance(model, LanguageModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not generate text: it is not a causal language "
            "model. opweave_engine.Embedder makes vectors with encoders of texts; "
            "opweave_engine.load_model loads any model, to be called as a module."
        )
    return model


def check_dtype(dtype: str | torch.dtype) -> str:
    """Return the name of *dtype* if models can be loaded in it (else InvalidArgumentError)."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidArgumentError(
            f"dtype={dtype!r} is not supported. Supported: auto, {', '.join(DTYPES)}."
        )
    return dtype


def check_load_format(load_format: str) -> None:
    """Raise InvalidArgumentError unless *load_format* is one."""
    known = get_args(LoadFormat)
    if load_format not in known:
        raise InvalidArgumentError(
            f"load_format={load_format!r} is not supported. Supported: {', '.join(known)}."
        )


def planned_model(config: Mapping[str, Any], tensors: int) -> CheckpointModel:
    """Return the model without memory for its weights, as one rank without others loads it.

    A checkpoint holds whole tensors, and a layer of several ranks would take one of a rank's size
    for that rank's part.
    """
    check_layers(config, tensors, "the number of tensors is")
    with torch.device("meta"), tensor_parallel(ALONE):
        return build(config, torch.float32)


def check_shapes(planned: CheckpointModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Load shapes alone, before memory is allocated: wrong sizes may ask for any amount of it."""
    with torch.device("meta"), tensor_parallel(ALONE):
        _fill(planned, ((name, torch.empty(shape)) for name, shape in shapes.items()))


def _fill(model: CheckpointModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    try:
        model.load_weights(tensors)
    except WeightsError as error:
        raise CheckpointError(str(error)) from error


def _tensors(
    sources: Sequence[TensorSource], packed: Mapping[str, LinearMethod], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name; of the modules in *packed*, the parameters that they keep."""
    names = [(n, source) for source in sources for n in source.shapes() if not is_cache_scale(n)]
    for done, (name, source) in enumerate(names, start=1):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in packed and isinstance(source, QuantizedSource):
            for own, tensor in source.parameters(module, packed[module]).items():
                yield f"{module}.{own}", tensor
        else:
            yield name, source.tensor(name)
        progress(done, len(names))
