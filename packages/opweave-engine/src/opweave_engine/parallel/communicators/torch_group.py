"""Collectives of ``torch.distributed``: gloo, NCCL, or what a platform's devices bring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed

from opweave.base import compat
from opweave.layers import TensorParallel
from opweave_engine.errors import CommunicatorError
from opweave_engine.parallel.communicators.base import Communicator, RankGroup


class TorchCommunicator(Communicator):
    """Calls the collectives of torch's process group.

    ``torch.compile`` traces them, as functional collectives, so that its passes see them. If the
    process has a group of all ranks already, as a program under ``torchrun`` may, that one is used.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._owns = not distributed.is_initialized()
        if self._owns:
            compat.forget_failed_groups()  # of which other ranks may have had more or fewer
            with self._named("joining the group"):
                distributed.init_process_group(
                    group.backend,
                    store=group.store,
                    rank=group.rank,
                    world_size=group.size,
                    timeout=timedelta(seconds=group.timeout),
                )
        found = distributed.get_rank(), distributed.get_world_size()
        if found != (group.rank, group.size):
            raise CommunicatorError(
                f"The engine's rank {group.rank} of {group.size} is rank {found[0]} of {found[1]} "
                "in torch.distributed's group of this process. Make tensor_parallel_size the size "
                "of that group, or leave the group to the engine."
            )
        # Bound once: Dynamo follows plain functions, and not what goes through a property.
        self._functional = TensorParallel.from_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        if compat.is_dynamo_compiling():
            return self._functional.all_reduce(x)
        with self._named("all_reduce"):
            return self._functional.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if compat.is_dynamo_compiling():
            return self._functional.all_gather(x, dim)
        # gloo does not know 8-bit floats, which are bytes to it.
        moved = x.view(torch.uint8) if x.element_size() == 1 else x
        with self._named("all_gather"):
            return self._functional.all_gather(moved, dim).view(x.dtype)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        with self._named("broadcast"):
            distributed.broadcast(x, source)

    def barrier(self) -> None:
        with self._named("barrier"):
            distributed.barrier()

    def abort(self) -> None:
        # Others notice the end of a connection; a kernel that waits on the device does not.
        if self.group.backend == "nccl" and distributed.is_initialized():
            world = distributed.group.WORLD
            assert world is not None  # the group is initialized
            world.abort()

    def close(self) -> None:
        if self._owns and distributed.is_initialized():
            distributed.destroy_process_group()
        self._owns = False

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            group = self.group
            raise CommunicatorError(
                f"rank {group.rank} of {group.size}: {what} failed: {error}"
            ) from error
