"""The logits of opweave's model in a checkpoint, and of transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models.tiny_checkpoints import random_ids
from opweave_engine import load_model

IDS = torch.tensor(random_ids(7, 40))


def logits(path: Path) -> torch.Tensor:
    model = load_model(path, dtype="float32")
    with torch.inference_mode():
        return model.compute_logits(model(IDS, torch.arange(len(IDS))))


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS[None]).logits[0]
    return found


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool((one - two).norm() <= 1e-4 * two.norm())
