"""Simulated ranks: a thread per rank, and collectives between them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

Returned = TypeVar("Returned")
_SECONDS = 60  # timeout in seconds of a collective


class _Meeting:
    """Rendezvous for the tensors of a group's ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=_SECONDS)
        self.brought: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all ranks, in rank order; owners may change theirs."""
        self.brought[rank] = tensor
        self.barrier.wait()
        found = [t.clone() for t in self.brought if t is not None]
        self.barrier.wait()  # the next exchange starts when all ranks have these
        return found


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
