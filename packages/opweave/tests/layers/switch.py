"""Layers built both ways: as the platform's op, and as what a compiler sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from opweave.config import CompilationConfig, compilation_config
from opweave.layers.parallel import TensorParallel, tensor_parallel

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

both_ways = pytest.mark.parametrize("custom_ops", ["all", "none"])


def built(custom_ops: str, make: Callable[[], T]) -> T:
    """Return the result of *make* under a config with these ``custom_ops``."""
    with compilation_config(CompilationConfig(custom_ops=custom_ops)):
        return make()


def ranks(size: int, make: Callable[[], M], run: Callable[[int, M], Tensor]) -> list[Tensor]:
    """The results of ``run(rank, layer)`` on *size* simulated ranks with a layer each.

    A collective must be the same on all: its inputs are collected by running every rank up to it,
    again and again, until all have come to their end.
    """
    exchanged: list[list[Tensor]] = []

    def attempt(rank: int) -> Tensor | None:
        calls = iter(range(len(exchanged) + 1))

        def collective(x: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
            step = next(calls)
            if step < len(exchanged):
                return join(exchanged[step])
            raise _Waiting(x)

        def gather(x: Tensor, dim: int = -1) -> Tensor:
            return collective(x, lambda parts: torch.cat(parts, dim))

        parallel = TensorParallel(rank, size, lambda x: collective(x, _sum), gather)
        with tensor_parallel(parallel):
            layer = make()
        return run(rank, layer)

    while True:
        results, waiting = [], []
        for rank in range(size):
            try:
                results.append(attempt(rank))
            except _Waiting as stop:
                waiting.append(stop.tensor)
        if not waiting:
            return [r for r in results if r is not None]
        assert not results, "some ranks ended without the collective that others wait for"
        exchanged.append(waiting)


class _Waiting(Exception):  # noqa: N818 - not an error
    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.tensor = tensor


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
