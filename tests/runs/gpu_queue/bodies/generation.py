"""How fast a model decodes, and how fast it computes a prompt."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine_cells.models import NAMES, write_config
from gpu_queue.bodies.models import CONTENDERS, config_of
from gpu_queue.job import Row
from gpu_queue.measuring import alone
from harness import copy_speed, significant

PROMPT = 128  # tokens before those that are decoded
_ROUNDS = 3
_WARM_UP = 2  # times: the second compiles what depends on a first one's sizes


def decode(
    contender: str, batch: int, device: str, size: str = "full", tokens: int = 64, **options: Any
) -> Iterator[Row]:
    """Yield the tokens per second of a batch, and the share of the memory's bandwidth.

    The limit is reading every weight once a step at the speed of a large copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "model", config_of(size))
        model = CONTENDERS[contender](path, batch, PROMPT, tokens, device=device, **options)
        for _ in range(_WARM_UP):
            model.steps()
        with alone():
            bandwidth = copy_speed(device, 2**30 if size == "full" else 2**20) * 1e9
            found = [statistics.median(model.steps()[2:]) for _ in range(_ROUNDS)]
    seconds = statistics.median(found)
    yield {
        "name": "decode",
        "case": f"{NAMES[size]}, bfloat16, batch {batch}, {PROMPT} + {tokens} tokens",
        "contender": contender,
        "value": significant(batch / seconds),
        "unit": "tokens/s",
        "ms": significant(seconds * 1e3),
        "limit_share": significant(model.read_bytes / bandwidth / seconds, 3),
        **_memory(device),
    }


def prefill(
    contender: str, prompt: int, device: str, size: str = "full", **options: Any
) -> Iterator[Row]:
    """Yield the tokens per second of one prompt, to its first token."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "model", config_of(size))
        model = CONTENDERS[contender](path, 1, prompt, 1, device=device, **options)
        for _ in range(_WARM_UP):
            model.steps()
        with alone():
            seconds = statistics.median(model.steps()[0] for _ in range(2 * _ROUNDS))
    yield {
        "name": "prefill",
        "case": f"{NAMES[size]}, bfloat16, {prompt} tokens",
        "contender": contender,
        "value": significant(prompt / seconds),
        "unit": "tokens/s",
        "ms": significant(seconds * 1e3),
        **_memory(device),
    }


def _memory(device: str) -> dict[str, float]:
    if device != "cuda":
        return {}
    return {"peak_gb": significant(torch.cuda.max_memory_allocated() / 1e9, 3)}
