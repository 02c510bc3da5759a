"""Moves tensors between the ranks of an engine."""

import logging
import mmap
import os
import platform
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from opweave import torch_compat
from opweave.layers import TensorParallel
from opweave_engine.errors import CommunicatorError

# The interface of communicators: collectives between the ranks of an engine.


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

    Attributes:
        is_recordable: whether graphs of kernel launches can contain :meth:`all_reduce` and
            :meth:`all_gather`.

    Raises:
        CommunicatorError: a rank is missing or unreachable; methods raise it, too.
    """

    is_recordable = False

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
        group = self.group
        reason = f"{type(self).__name__} with {group.backend!r} does not record collectives"
        unrecorded = "" if self.is_recordable else reason
        return TensorParallel(group.rank, group.size, self.all_reduce, self.all_gather, unrecorded)


# Memory that the ranks on one machine share, and how they take turns in it.
#
# Each rank has two slots and a counter. In step *n* it writes slot *n* mod 2, raises its counter
# to *n*, and waits until all counters are at *n*; then it reads the slots of the others. No rank
# writes a slot again before all have read it: a counter at *n* + 1 means that its rank has read
# step *n*.


SLOT = 1 << 20  # bytes that a rank can bring at a time
_LINE_WORDS = 8  # words in a cache line
_HEADER_WORDS = mmap.PAGESIZE // 8  # words before the slots
_MAX_RANKS = _HEADER_WORDS // _LINE_WORDS - 1
_ABORTED_WORD = 0  # the word of the first line
_SPINS = 200  # about ten microseconds
_YIELD_SECONDS = 0.002  # before a waiting rank lets the processor sleep
_SLEEP_SECONDS = 0.0002


class Segment:
    """The shared memory, as one rank sees it.

    Args:
        descriptor: descriptor of the mapped file; not needed afterwards.
        rank: the rank of this process.
        size: the number of ranks.
        timeout: seconds to wait for another rank.
    """

    def __init__(self, descriptor: int, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(self._memory).cast("q")
        data = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_HEADER_WORDS * 8)
        self._slots = data.view(size, 2, SLOT)
        self._sequence = 0
        self._others = [other for other in range(size) if other != rank]

    @classmethod
    def create(cls, size: int, timeout: float) -> tuple[Self, Path, str]:
        """Create a segment on rank 0; return it, the path for other ranks, and its name.

        The file is not in a folder, so it disappears when the ranks end.

        Raises:
            OSError: there is not enough memory.
        """
        if size > _MAX_RANKS:
            raise OSError(f"{size} ranks share a segment for {_MAX_RANKS} at most")
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no memfd_create")
        name = f"opweave-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(name)
        try:
            # Now, and not at the first write, where a lack of memory would kill the process.
            os.posix_fallocate(descriptor, 0, _HEADER_WORDS * 8 + size * 2 * SLOT)
            segment = cls(descriptor, 0, size, timeout)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(segment, os.close, descriptor)
        return segment, Path(f"/proc/{os.getpid()}/fd/{descriptor}"), name

    @classmethod
    def open(cls, path: Path, name: str, rank: int, size: int, timeout: float) -> Self | None:
        """Open the segment of rank 0, or return None if it is on another machine."""
        try:
            if not str(path.readlink()).startswith(f"/memfd:{name} "):
                return None  # another process has that number here
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            return cls(descriptor, rank, size, timeout)
        finally:
            os.close(descriptor)

    def exchange(self, piece: Tensor, tag: int) -> list[Tensor]:
        """Share *piece*; return the bytes of every rank, which are valid until the next call.

        Args:
            piece: ``(bytes,)`` uint8, at most :data:`SLOT`.
            tag: identifies the collective.

        Raises:
            CommunicatorError: a rank uses another tag, or does not respond in time.
        """
        self._sequence = number = self._sequence + 1
        parity, words, count = number & 1, self._words, piece.numel()
        if count:
            self._slots[self.rank, parity, :count].copy_(piece)
        line = _LINE_WORDS * (self.rank + 1)
        words[line + 1 + parity] = tag
        # The counter is written last: a rank that sees it sees the rest (see _ORDERED_MACHINES).
        words[line] = number
        for other in self._others:
            self._wait(other, number)
        # After all have arrived: a rank that went on would overwrite what others still read.
        for other in self._others:
            if words[_LINE_WORDS * (other + 1) + 1 + parity] != tag:
                raise CommunicatorError(
                    f"rank {self.rank} and rank {other} are at different collectives, or bring "
                    "tensors of different shapes or dtypes."
                )
        return [self._slots[rank, parity, :count] for rank in range(self.size)]

    def abort(self) -> None:
        """Make all ranks that wait, now or later, raise."""
        self._words[_ABORTED_WORD] = 1

    def _wait(self, other: int, number: int) -> None:
        words, at = self._words, _LINE_WORDS * (other + 1)
        for _ in range(_SPINS):
            if words[at] >= number:
                return
        began = time.monotonic()
        while words[at] < number:
            waited = time.monotonic() - began
            if words[_ABORTED_WORD]:
                raise CommunicatorError(f"rank {self.rank} waited for rank {other}: aborted.")
            if waited > self.timeout:
                raise CommunicatorError(
                    f"rank {self.rank} waited {self.timeout:g} s for rank {other}, which did not "
                    "come to a collective."
                )
            os.sched_yield()
            # Even sleep(0) releases the interpreter to other threads.
            time.sleep(0 if waited < _YIELD_SECONDS else _SLEEP_SECONDS)


# Collectives of ``torch.distributed``: gloo, NCCL, or what a platform's devices bring.


class TorchCommunicator(Communicator):
    """Calls the collectives of torch's process group.

    ``torch.compile`` traces them, as functional collectives, so that its passes see them. If the
    process has a group of all ranks already, as a program under ``torchrun`` may, that one is used.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.is_recordable = group.backend == "nccl"  # and RCCL, which has the same name
        self._owns = not distributed.is_initialized()
        if self._owns:
            # Ranks may have had different numbers of failed groups, which torch counts.
            torch_compat.forget_failed_groups()
            rank, size, timeout = group.rank, group.size, timedelta(seconds=group.timeout)
            with self._named("joining the group"):
                distributed.init_process_group(
                    group.backend, store=group.store, rank=rank, world_size=size, timeout=timeout
                )
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if (rank, size) != (group.rank, group.size):
            raise CommunicatorError(
                f"The engine's rank {group.rank} of {group.size} is rank {rank} of {size} "
                "in torch.distributed's group of this process. Make tensor_parallel_size the size "
                "of that group, or leave the group to the engine."
            )
        # Bound once: Dynamo follows plain functions, but not properties.
        self._functional = TensorParallel.from_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        if torch_compat.is_dynamo_compiling():
            return self._functional.all_reduce(x)
        with self._named("all_reduce"):
            return self._functional.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if torch_compat.is_dynamo_compiling():
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
    def _named(self, task: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            group = self.group
            raise CommunicatorError(
                f"rank {group.rank} of {group.size}: {task} failed: {error}"
            ) from error


# Collectives through memory that the ranks on one machine share.


_log = logging.getLogger(__name__)

# Stores of one core are seen in their order by the others: a counter after the data it counts.
# Intel SDM volume 3A, 8.2.2; AMD64 manual volume 2, 7.2.
_ORDERED_MACHINES = ("x86_64", "AMD64")
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

    def all_reduce(self, x: Tensor) -> Tensor:
        if (segment := self._segment_for(x)) is None:
            return super().all_reduce(x)
        flat = x.contiguous().view(-1)
        total = torch.empty_like(flat)
        for start, pieces in self._pieces(segment, flat, _REDUCE):
            total[start : start + len(pieces[0])] = _sum(pieces)
        return total.view(x.shape)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if (segment := self._segment_for(x)) is None:
            return super().all_gather(x, dim)
        flat = x.contiguous().view(-1)
        stacked = flat.new_empty(self.group.size, len(flat))
        for start, pieces in self._pieces(segment, flat, _GATHER):
            for rank, piece in enumerate(pieces):
                stacked[rank, start : start + len(piece)] = piece
        dim %= x.ndim
        return stacked.view(self.group.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        if (segment := self._segment_for(x)) is None:
            super().broadcast(x, source)
            return
        flat = x.view(-1)
        for start, pieces in self._pieces(segment, flat, _BROADCAST):
            flat[start : start + len(pieces[source])] = pieces[source]

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

    def _segment_for(self, x: Tensor) -> Segment | None:
        """Return the shared memory if it can move *x*."""
        is_movable = x.device.type == "cpu" and not torch_compat.is_dynamo_compiling()
        return self._segment if is_movable else None

    def _pieces(self, segment: Segment, flat: Tensor, kind: int) -> Any:
        """Exchange *flat* piece by piece; yield the start of each, and the piece of every rank."""
        step = SLOT // flat.element_size()
        for start in range(0, len(flat), step):
            piece = flat[start : start + step].view(torch.uint8)
            tag = kind << 48 | _DTYPES[flat.dtype] << 32 | len(piece)
            yield start, [data.view(flat.dtype) for data in segment.exchange(piece, tag)]

    def _meet(self) -> Segment | None:
        """Share memory with the other ranks, if all can; else none does."""
        group, segment = self.group, None
        shared: list[Any] = [None]  # the path and the name of the segment
        if group.rank == 0 and platform.machine() in _ORDERED_MACHINES:
            try:
                segment, path, name = Segment.create(group.size, group.timeout)
                shared = [(path, name)]
            except OSError as error:
                _log.warning("no memory is shared between ranks: %s", error)
        distributed.broadcast_object_list(shared, src=0)
        if shared[0] is None:
            return None
        if group.rank:
            path, name = shared[0]
            segment = Segment.open(path, name, group.rank, group.size, group.timeout)
        outcomes: list[Any] = [None] * group.size
        distributed.all_gather_object(outcomes, segment is not None)
        return segment if all(outcomes) else None


def _sum(pieces: list[Tensor]) -> Tensor:
    dtype = pieces[0].dtype
    if len(pieces) > 2 and dtype in (torch.float16, torch.bfloat16):
        return reduce(torch.Tensor.add_, pieces[1:], pieces[0].float()).to(dtype)
    return reduce(torch.add, pieces)  # two are rounded once in either case
