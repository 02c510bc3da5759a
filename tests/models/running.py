"""Ways to run a language model: at once, in steps through a cache, on several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch import Tensor

from opweave.layers.parallel import TensorParallel, tensor_parallel
from opweave.models import ForwardContext, forward_context

# Lowered graphs run as they are by default, and through code generation in the long sweep.
each_codegen = pytest.mark.parametrize(
    "codegen", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["graph", "code"]
)
Built = TypeVar("Built")
Result = TypeVar("Result")


class LanguageModel(Protocol):
    """What every language model does."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class GrowingCache:
    """A cache of one sequence that is a list of what was appended."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat((old_key, key)), torch.cat((old_value, value))
        self.layers[layer] = key.clone(), value.clone()
        return self.layers[layer]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


def whole(model: LanguageModel, ids: Tensor) -> Tensor:
    return model.compute_logits(model(ids, torch.arange(len(ids))))


def in_steps(model: LanguageModel, ids: Tensor, prefill: int) -> Tensor:
    """Prefill some tokens, then one token at a time."""
    cache, logits = GrowingCache(), []
    for start, end in [(0, prefill), *((i, i + 1) for i in range(prefill, len(ids)))]:
        starts = torch.tensor([0, end - start], dtype=torch.int32)
        ends = torch.tensor([0, end], dtype=torch.int32)
        with forward_context(ForwardContext(starts, ends, cache)):
            hidden = model(ids[start:end], torch.arange(start, end))
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits)


def expected(reference: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(ids[None]).logits[0]
    return logits


def compiled(model: Any, codegen: bool) -> Any:
    """Return *model* as one compiled graph."""
    torch.compiler.reset()
    options = {"codegen": codegen}
    return torch.compile(model, backend="opweave", fullgraph=True, dynamic=True, options=options)


def on_ranks(size: int, build: Callable[[], Built], run: Callable[[Built], Result]) -> list[Result]:
    """Build a model's part for each of *size* ranks, and run the parts side by side in threads."""
    barrier = threading.Barrier(size, timeout=60)
    shared: list[Tensor] = [torch.empty(0)] * size

    def exchange(rank: int, x: Tensor) -> list[Tensor]:
        shared[rank] = x
        barrier.wait()
        found = list(shared)
        barrier.wait()
        return found

    def rank_of(rank: int) -> TensorParallel:
        return TensorParallel(
            rank,
            size,
            lambda x: torch.stack(exchange(rank, x)).sum(0),
            lambda x, dim=-1: torch.cat(exchange(rank, x), dim),
        )

    def run_one(part: Built) -> Result:
        try:
            with torch.inference_mode():
                return run(part)
        except BaseException:
            barrier.abort()
            raise

    parts = []
    for rank in range(size):
        with tensor_parallel(rank_of(rank)):
            parts.append(build())
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run_one, parts))
