"""The interface of communicators: collectives between the ranks of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from opweave.layers import TensorParallel


@dataclass(frozen=True)
class RankGroup:
    """The ranks of an engine, and this process's rank.

    Attributes:
        rank: this process's, from 0.
        size: the number of ranks.
        device: where this rank's tensors are.
        backend: of ``torch.distributed``, as the platform names it.
        store: the rendezvous store, shared by all ranks.
        timeout: seconds that a rank waits for another one.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    store: Store
    timeout: float


class Communicator(ABC):
    """Collectives between the ranks of a group; all ranks call them in the same order.

    Platforms choose a class with ``get_device_communicator_cls``. The constructor waits for all
    ranks.

    Args:
        group: the ranks.

    Raises:
        CommunicatorError: a rank is missing or unreachable; methods raise it, too.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, as a new tensor, in the dtype of *x*.

        Every rank gets the same bits. *x* is not changed.
        """

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors concatenated in *dim*, in rank order, as a new tensor."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite *x*, a contiguous tensor, with that of rank *source*, in place."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks call this method."""

    def abort(self) -> None:  # noqa: B027 - optional
        """Make a waiting collective raise at once. Other threads may call only this method."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources. A second call is a no-op."""

    def tensor_parallel(self) -> TensorParallel:
        """Return the collectives and the rank in the form that layers use."""
        return TensorParallel(self.group.rank, self.group.size, self.all_reduce, self.all_gather)
