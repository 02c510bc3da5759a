"""The communicator: devices exchange tensors through the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_device.engine.usage import usage
from opweave_engine.parallel.communicators import SharedMemoryCommunicator


class AcmeCommunicator(SharedMemoryCommunicator):
    """Moves a tensor to the host, exchanges it there, and moves the result back.

    There is no wire between two devices: each belongs to a process, and the processes share memory
    of the host.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        _count()
        return super().all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        _count()
        return super().all_gather(x.cpu(), dim).to(x.device)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        _count()
        host = x.cpu()
        super().broadcast(host, source)
        x.copy_(host)


def _count() -> None:
    if not torch.compiler.is_compiling():  # the count would recompile each step
        usage.collectives += 1
