"""The logits of opweave's model in a checkpoint, and of transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models.running import compiled, on_ranks, whole
from models.tiny_checkpoints import random_ids
from opweave.layers import TensorParallel, tensor_parallel
from opweave_engine import load_model

IDS = torch.tensor(random_ids(7, 40))


def logits(path: Path) -> torch.Tensor:
    model = load_model(path, dtype="float32")
    with torch.inference_mode():
        return model.compute_logits(model(IDS, torch.arange(len(IDS))))


def compiled_logits(path: Path) -> torch.Tensor:
    """Return the logits of the model as one compiled graph."""
    model = load_model(path, dtype="float32")
    run = compiled(model, codegen=False)
    with torch.inference_mode():
        return model.compute_logits(run(IDS, torch.arange(len(IDS))))


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS[None]).logits[0]
    return found


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool((one - two).norm() <= 1e-4 * two.norm())


def on_two_ranks(path: Path) -> list[torch.Tensor]:
    """Return the logits of each of two tensor-parallel ranks, in threads."""
    return on_ranks(2, lambda: load_model(path, dtype="float32"), lambda m: whole(m, IDS))


def load_first_of_two(path: Path) -> None:
    """Load the first rank's part, without the second."""

    def unused(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        raise AssertionError("nothing is computed")

    with tensor_parallel(TensorParallel(0, 2, unused, unused)):
        load_model(path)
