"""Collectives through memory that the ranks on one machine share."""

from __future__ import annotations

import logging
import platform
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from opweave.base import compat
from opweave_engine.parallel.communicators.base import RankGroup
from opweave_engine.parallel.communicators.segment import SLOT, Segment
from opweave_engine.parallel.communicators.torch_group import TorchCommunicator

_log = logging.getLogger(__name__)

# Stores of one core are seen in their order by the others: a counter after the data it counts.
# Intel SDM volume 3A, 8.2.2; AMD64 manual volume 2, 7.2.
_ORDERED = ("x86_64", "AMD64")
_REDUCE, _GATHER, _BROADCAST, _BARRIER = range(1, 5)
_DTYPES = {
    dtype: number
    for number, dtype in enumerate(d for d in vars(torch).values() if isinstance(d, torch.dtype))
}


class SharedMemoryCommunicator(TorchCommunicator):
    """Moves tensors on the CPU through shared memory, if all ranks are on one machine.

    The sum is made in the order of the ranks, so that every rank has the same bits; of float16 and
    bfloat16 it is made in float32. Where memory cannot be shared (several machines, or a processor
    whose stores may be seen out of order), and in what ``torch.compile`` traces, it does what its
    base class does.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._segment = self._meet()
        how = "the process group" if self._segment is None else "shared memory"
        _log.info("rank %d of %d: collectives go through %s", group.rank, group.size, how)

    @property
    def is_shared(self) -> bool:
        """Whether memory is shared."""
        return self._segment is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._segment is None or compat.is_dynamo_compiling() or x.device.type != "cpu":
            return super().all_reduce(x)
        flat = x.contiguous().view(-1)
        total = torch.empty_like(flat)
        for start, brought in self._pieces(self._segment, flat, _REDUCE):
            total[start : start + len(brought[0])] = _sum(brought)
        return total.view(x.shape)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if self._segment is None or compat.is_dynamo_compiling() or x.device.type != "cpu":
            return super().all_gather(x, dim)
        flat = x.contiguous().view(-1)
        stacked = flat.new_empty(self.group.size, len(flat))
        for start, brought in self._pieces(self._segment, flat, _GATHER):
            for rank, piece in enumerate(brought):
                stacked[rank, start : start + len(piece)] = piece
        dim %= x.ndim
        return stacked.view(self.group.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        if self._segment is None or x.device.type != "cpu":
            super().broadcast(x, source)
            return
        flat = x.view(-1)
        for start, brought in self._pieces(self._segment, flat, _BROADCAST):
            flat[start : start + len(brought[source])] = brought[source]

    def barrier(self) -> None:
        if self._segment is None:
            super().barrier()
        else:
            self._segment.exchange(torch.empty(0, dtype=torch.uint8), _BARRIER)

    def abort(self) -> None:
        if self._segment is not None:
            self._segment.abort()
        super().abort()

    def close(self) -> None:
        self._segment = None
        super().close()

    def _pieces(self, segment: Segment, flat: Tensor, what: int) -> Any:
        """Exchange *flat* piece by piece; yield where each begins, and it of every rank."""
        step = SLOT // flat.element_size()
        for start in range(0, len(flat), step):
            piece = flat[start : start + step].view(torch.uint8)
            tag = what << 48 | _DTYPES[flat.dtype] << 32 | len(piece)
            yield start, [each.view(flat.dtype) for each in segment.exchange(piece, tag)]

    def _meet(self) -> Segment | None:
        """Share memory with the other ranks, if all can; else none does."""
        group, made, path, name = self.group, None, Path(), ""
        if group.rank == 0 and platform.machine() in _ORDERED:
            try:
                made, path, name = Segment.create(group.size, group.timeout)
            except OSError as error:
                _log.warning("no memory is shared between ranks: %s", error)
        told: list[Any] = [(str(path), name) if made is not None else None]
        distributed.broadcast_object_list(told, src=0)
        if told[0] is None:
            return None
        if group.rank:
            place = Path(told[0][0])
            made = Segment.open(place, told[0][1], group.rank, group.size, group.timeout)
        found: list[Any] = [None] * group.size
        distributed.all_gather_object(found, made is not None)
        return made if all(found) else None


def _sum(brought: list[Tensor]) -> Tensor:
    first, dtype = brought[0], brought[0].dtype
    if len(brought) > 2 and dtype in (torch.float16, torch.bfloat16):
        return reduce(torch.Tensor.add_, brought[1:], first.float()).to(dtype)
    return reduce(torch.add, brought)  # two are rounded once in either case
