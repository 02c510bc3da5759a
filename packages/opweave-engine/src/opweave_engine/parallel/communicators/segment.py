"""Memory that the ranks on one machine share, and how they take turns in it.

Each rank has two slots and a counter. In step *n* it writes slot *n* mod 2, raises its counter to
*n*, and waits until all counters are at *n*; then it reads the slots of the others. No rank writes
a slot again before all have read it: a counter at *n* + 1 means that its rank has read step *n*.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from opweave_engine.errors import CommunicatorError

SLOT = 1 << 20  # bytes that a rank can bring at a time
_LINE = 8  # words in a cache line
_HEADER = mmap.PAGESIZE // 8  # words before the slots
_MOST_RANKS = _HEADER // _LINE - 1
_ABORTED = 0  # the word of the first line
_SPINS = 200  # about ten microseconds
_PATIENCE = 0.002  # seconds before a rank that waits lets the processor sleep
_NAP = 0.0002


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
        data = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_HEADER * 8)
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
        if size > _MOST_RANKS:
            raise OSError(f"{size} ranks share a segment for {_MOST_RANKS} at most")
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no memfd_create")
        name = f"opweave-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(name)
        try:
            # Now, and not at the first write, where a lack of memory would kill the process.
            os.posix_fallocate(descriptor, 0, _HEADER * 8 + size * 2 * SLOT)
            made = cls(descriptor, 0, size, timeout)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(made, os.close, descriptor)
        return made, Path(f"/proc/{os.getpid()}/fd/{descriptor}"), name

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
        own = _LINE * (self.rank + 1)
        words[own + 1 + parity] = tag
        words[own] = number  # last: who sees it sees the rest (see SharedMemoryCommunicator)
        for other in self._others:
            self._wait(other, number)
        # Only now: who goes on while another is in the step before writes what that one reads.
        for other in self._others:
            if words[_LINE * (other + 1) + 1 + parity] != tag:
                raise CommunicatorError(
                    f"rank {self.rank} and rank {other} are at different collectives, or bring "
                    "tensors of different shapes or dtypes."
                )
        return [self._slots[rank, parity, :count] for rank in range(self.size)]

    def abort(self) -> None:
        """Make all ranks that wait, now or later, raise."""
        self._words[_ABORTED] = 1

    def _wait(self, other: int, number: int) -> None:
        words, at = self._words, _LINE * (other + 1)
        for _ in range(_SPINS):
            if words[at] >= number:
                return
        began = time.monotonic()
        while words[at] < number:
            waited = time.monotonic() - began
            if words[_ABORTED]:
                raise CommunicatorError(f"rank {self.rank} waited for rank {other}: aborted.")
            if waited > self.timeout:
                raise CommunicatorError(
                    f"rank {self.rank} waited {self.timeout:g} s for rank {other}, which did not "
                    "come to a collective."
                )
            os.sched_yield()
            time.sleep(0 if waited < _PATIENCE else _NAP)  # lets other threads run in any case
