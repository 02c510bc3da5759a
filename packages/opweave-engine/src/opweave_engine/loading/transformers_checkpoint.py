"""Loads models by transformers' code, with the checks that all checkpoints get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.build import (
    MOST_LAYERS,
    check_layers,
    check_memory,
    check_parameters,
    check_sizes,
)
from opweave_engine.loading.checkpoint import Checkpoint, Progress, TensorFile
from opweave_engine.loading.dtypes import dtype_of, named_dtype, shapes_of
from opweave_engine.loading.quantization import plain_weights, unquantized
from opweave_engine.models import CheckpointModel, UnsupportedModelError, WeightsError

Model = TypeVar("Model", bound=CheckpointModel, covariant=True)


class LoadFunction(Protocol[Model]):
    """A function of :mod:`opweave_engine.transformers`."""

    def __call__(
        self,
        path: Path,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        seed: int | None,
        check: Callable[[nn.Module], None],
    ) -> Model: ...


def load_by_transformers(
    load: LoadFunction[Model],
    checkpoint: Checkpoint,
    dtype: str,
    seed: int | None,
    progress: Progress | None,
) -> Model:
    """Return what *load* makes of a checkpoint.

    Args:
        load: builds the model.
        checkpoint: the directory.
        dtype: ``"auto"``, or a name of ``DTYPES``.
        seed: of random weights; None: load those of the files.
        progress: called at the beginning and the end; transformers does not say how far it is.

    Raises:
        CheckpointError: a file is missing or damaged, or tensors do not fit the model.
        ModelError: the configuration is invalid or not supported, or the checkpoint is a GGUF
            file.
    """
    config = checkpoint.config()
    if checkpoint.gguf is not None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: transformers' code does not run models from GGUF files; opweave's "
            "does. Leave model_impl out, or give a checkpoint directory."
        )
    check_sizes(config)
    named = named_dtype(dtype, config)
    if seed is not None:
        check_layers(config, MOST_LAYERS, "there can be")
        weight_dtype = named or torch.float32
        return load(
            checkpoint.path,
            config,
            weight_dtype,
            seed=seed,
            check=partial(check_memory, dtype=weight_dtype),
        )
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(file)) for file in checkpoint.tensor_files()]
        original = config
        config = unquantized(original, checkpoint, files)
        shapes = shapes_of(files)
        check_layers(config, len(shapes), "the number of tensors is")
        check = partial(check_parameters, held=sum(map(prod, shapes.values())))
        kept = named or dtype_of(files)
    report = progress or (lambda *_: None)
    report(0, 1)
    with plain_weights(original, checkpoint):
        try:
            model = load(checkpoint.path, config, kept, seed=None, check=check)
        except WeightsError as error:
            raise CheckpointError(str(error)) from error
    report(1, 1)
    return model
