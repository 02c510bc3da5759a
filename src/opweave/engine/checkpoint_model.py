"""Loads a model that is made of layers from a checkpoint directory, strictly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from opweave.engine.checkpoint import Checkpoint, TensorFile
from opweave.engine.errors import CheckpointError
from opweave.engine.loader import DTYPES, check_dtype
from opweave.models import CheckpointModel, build_model


def load_checkpoint(path: str | Path, *, dtype: str | torch.dtype = "auto") -> CheckpointModel:
    """Build the model that directory *path* holds, and load its weights.

    Inside a :func:`~opweave.layers.parallel.tensor_parallel` block, that is one rank's part of it.

    Args:
        path: with ``config.json`` and safetensors files, sharded or not.
        dtype: ``"auto"`` for the checkpoint's (float32 if it does not say), or one of ``DTYPES``:
            weights are cast to it.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint's dtype is none of these.
        InvalidArgumentError: *dtype* is something else.
        ModelError: the configuration is invalid or not supported, or tensors are missing,
            unexpected or do not fit; the message lists them together.
    """
    wanted = check_dtype(dtype)
    checkpoint = Checkpoint(path)
    config = checkpoint.config()
    if wanted == "auto":
        saved = config.get("dtype", config.get("torch_dtype")) or "float32"
        wanted = str(saved).removeprefix("torch.")
    if wanted not in DTYPES:
        raise CheckpointError(
            f"config.json has dtype {wanted!r}, which dtype='auto' cannot follow. "
            f"Choose one of: {', '.join(DTYPES)}."
        )
    model = build_model(config, dtype=DTYPES[wanted])
    model.load_weights(_tensors(checkpoint))
    return model.eval()


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    for path in checkpoint.tensor_files():
        with TensorFile(path) as file:
            for name in file.shapes():
                yield name, file.tensor(name)
