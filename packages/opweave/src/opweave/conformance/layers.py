"""Checks of layers: an oracle, weight loading, tensor parallelism. For tests of layers.

>>> import torch
>>> from opweave.conformance import layers
>>> layer = torch.nn.Linear(4, 2, bias=False)
>>> layers.check_oracle(layer, lambda x: x @ layer.weight.T, torch.randn(3, 4))
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from opweave.conformance.snapshot import same_bits
from opweave.conformance.subject import NonconformingError
from opweave.ir.tolerance import DEFAULT_TOLERANCES, Tolerance

# Simulated ranks: a thread per rank, and collectives between them.


Returned = TypeVar("Returned")
_COLLECTIVE_SECONDS = 60


class _Meeting:
    """Rendezvous for the tensors of a group's ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=_COLLECTIVE_SECONDS)
        self.tensors: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all ranks, in rank order; owners may change theirs."""
        self.tensors[rank] = tensor
        self.barrier.wait()
        copies = [t.clone() for t in self.tensors if t is not None]
        self.barrier.wait()  # the next exchange starts when all ranks have these
        return copies


@dataclass(frozen=True)
class Rank:
    """A rank of a group, with the collectives that a tensor-parallel layer needs."""

    rank: int
    size: int
    meeting: _Meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, added in their order, in the dtype of *x*."""
        return reduce(torch.add, self.meeting.exchange(self.rank, x))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors, concatenated."""
        return torch.cat(self.meeting.exchange(self.rank, x), dim)


def on_ranks(size: int, run: Callable[[Rank], Returned]) -> list[Returned]:
    """Call *run* on *size* ranks concurrently; return their results.

    Gradient mode and context variables are those of the calling thread. If a rank raises, waiting
    ranks are released, and its error is raised here.
    """
    meeting, recorded = _Meeting(size), torch.is_grad_enabled()

    def one(rank: int) -> Returned:
        try:
            with torch.set_grad_enabled(recorded):
                return run(Rank(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        contexts = [contextvars.copy_context() for _ in range(size)]
        futures = [pool.submit(contexts[rank].run, one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


# Checks of layers.


Weight = tuple[Any, ...]  # (name, tensor) or (name, tensor, shard_id)


def check_oracle(
    layer: Callable[..., Any],
    oracle: Callable[..., Any],
    *inputs: Any,
    tolerance: Tolerance | None = None,
) -> None:
    """Raise NonconformingError unless *layer* and *oracle* return the same.

    Args:
        tolerance: the tolerance; by default that of ops for the result's dtype.
    """
    with torch.no_grad():
        _check_same(layer(*inputs), oracle(*inputs), tolerance, "the oracle")


def load(layer: nn.Module, weights: Iterable[Weight]) -> None:
    """Load full weights into *layer*, each through the ``weight_loader`` of its parameter.

    Args:
        weights: ``(name, tensor)``, or ``(name, tensor, shard_id)`` for a part of a merged one.

    Raises:
        NonconformingError: the parameter does not exist, or does not have a ``weight_loader``.
    """
    parameters = dict(layer.named_parameters())
    for name, tensor, *shard in weights:
        if name not in parameters:
            raise NonconformingError(
                f"{type(layer).__name__} has no parameter {name!r}; it has {sorted(parameters)}."
            )
        loader = getattr(parameters[name], "weight_loader", None)
        if loader is None:
            raise NonconformingError(
                f"{type(layer).__name__}: parameter {name!r} has no weight_loader."
            )
        loader(parameters[name], tensor, *shard)


def check_loading(layer: nn.Module, weights: Iterable[Weight]) -> None:
    """Raise NonconformingError unless *weights* fill every parameter, the same each time."""
    listed = list(weights)
    first = _loaded(layer, listed)
    for name, value in first.items():
        if value.is_floating_point() and value.isnan().any():
            raise NonconformingError(
                f"{type(layer).__name__}: {int(value.isnan().sum())} of {value.numel()} elements "
                f"of {name!r} are not loaded."
            )
    for name, value in _loaded(layer, listed[::-1]).items():
        if not same_bits(value, first[name]):
            raise NonconformingError(
                f"{type(layer).__name__}: {name!r} depends on the order of loading."
            )


def check_ranks(
    build: Callable[[Rank | None], Callable[..., Any]],
    *inputs: Any,
    size: int = 2,
    tolerance: Tolerance | None = None,
) -> None:
    """Raise NonconformingError unless a layer on *size* ranks returns the same as on one.

    Args:
        build: returns the layer with loaded weights for a rank, or for a single rank if the
            argument is None. It is called in the rank's thread, and so is the layer.
    """
    with torch.no_grad():
        whole = build(None)(*inputs)
        parts = on_ranks(size, lambda rank: build(rank)(*inputs))
    for rank, part in enumerate(parts):
        _check_same(part, whole, tolerance, f"one rank alone (this is rank {rank} of {size})")


def _loaded(layer: nn.Module, weights: Iterable[Weight]) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan") if parameter.is_floating_point() else 0)
        load(layer, weights)
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def _check_same(result: Any, expected: Any, tolerance: Tolerance | None, oracle: str) -> None:
    for i, (a, b) in enumerate(zip(_tensors(result), _tensors(expected), strict=True)):
        atol, rtol = tolerance or DEFAULT_TOLERANCES.get(b.dtype, Tolerance(0, 0))
        try:
            torch.testing.assert_close(a, b, atol=atol, rtol=rtol, equal_nan=True)
        except AssertionError as error:
            message = " ".join(str(error).split())
            raise NonconformingError(f"output {i} is not that of {oracle}: {message}") from None


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result; None, as some layers return for a bias, is left out."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part for part in parts if part is not None]
