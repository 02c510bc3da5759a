"""Dtypes and shapes of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.sources import TensorSource
from opweave_engine.models.fields import Fields
from opweave_engine.models.weights import shown_name

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def named_dtype(dtype: str, config: Mapping[str, Any]) -> torch.dtype | None:
    """Return *dtype*, or the configuration's; None if neither says one."""
    saved = Fields(config).dtype()
    if dtype == "auto" and saved is None:
        return None
    if dtype == "auto" and saved not in DTYPES:
        raise CheckpointError(
            f"config.json has dtype {saved!r}, which dtype='auto' cannot follow. "
            f"Choose one of: {', '.join(DTYPES)}."
        )
    return DTYPES[str(saved) if dtype == "auto" else dtype]


def dtype_of(files: Iterable[TensorSource]) -> torch.dtype:
    """Return the dtype of a tensor, where models can be loaded in it."""
    for file in files:
        for name in list(file.shapes())[:1]:
            if (found := file.tensor(name).dtype) in DTYPES.values():
                return found
    return torch.float32


def shapes_of(files: Iterable[TensorSource]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, by name, if each is in one file only."""
    shapes: dict[str, tuple[int, ...]] = {}
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
