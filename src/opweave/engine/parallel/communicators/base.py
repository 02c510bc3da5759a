"""What an engine asks of whatever moves tensors between its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from opweave.layers import TensorParallel


@dataclass(frozen=True)
class RankGroup:
    """The ranks of an engine, and this one's place among them.

    Attributes:
        rank: this process's, from 0.
        size: how many there are.
        device: where this rank's tensors are.
        backend: of ``torch.distributed``, as the platform names it.
        store: where the ranks meet; all have the same one.
        timeout: seconds that a rank waits for another one.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    store: Store
    timeout: float


class Communicator(ABC):
    """Collectives between the ranks of a group: each is called by all of them, in one order.

    A platform names its own with ``get_device_communicator_cls``. Building one waits until all
    ranks have built theirs.

    Args:
        group: the ranks.

    Raises:
        CommunicatorError: a rank does not come, or cannot be reached; of every method, too.
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
        """Return the ranks' tensors side by side in *dim*, in the order of the ranks; a new one."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite *x*, which is contiguous, with that of rank *source*, in place."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have come here."""

    def abort(self) -> None:  # noqa: B027 - there need be nothing to do
        """Let a collective that waits raise at once; the only method for another thread."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. A second call does nothing."""

    def tensor_parallel(self) -> TensorParallel:
        """Return this rank's place as layers take it; they call these collectives."""
        return TensorParallel(self.group.rank, self.group.size, self.all_reduce, self.all_gather)
