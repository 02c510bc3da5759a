"""Memory that the ranks on one machine share, and how they take turns in it.

Each rank has two slots and a counter. In step *n* it writes slot *n* mod 2, raises its counter to
*n*, and waits until all counters are at *n*; then it reads the slots of the others. No rank writes
a slot again before all have read it: who raises its counter to *n* + 1 has read those of step *n*.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from opweave.engine.errors import CommunicatorError

SLOT = 1 << 20  # bytes that a rank can bring at a time
_LINE = 8  # words in a cache line
_HEADER = mmap.PAGESIZE // 8  # words before the slots
_MOST_RANKS = _HEADER // _LINE - 1
_NONCE, _ABORTED = 0, 1  # words of the first line
_SPINS = 200  # about ten microseconds
_PATIENCE = 0.002  # seconds before a rank that waits lets the processor sleep
_NAP = 0.0002
_FOLDER = Path("/dev/shm")


class Segment:
    """The shared memory, as one rank sees it.

    Args:
        path: of the file, which all ranks have open.
        rank: whose view it is.
        size: how many ranks there are.
        timeout: seconds to wait for another rank.
    """

    def __init__(self, path: Path, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._memory).cast("q")
        data = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_HEADER * 8)
        self._slots = data.view(size, 2, SLOT)
        self._sequence = 0
        self._others = [other for other in range(size) if other != rank]

    @classmethod
    def create(cls, size: int, timeout: float) -> tuple[Self, Path, int]:
        """Make one, for rank 0; return it, the path of its file, and the number that is in it.

        Raises:
            OSError: there is no room for it.
        """
        if size > _MOST_RANKS:
            raise OSError(f"{size} ranks share a segment for {_MOST_RANKS} at most")
        folder = _FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())
        path, nonce = folder / f"opweave-{secrets.token_hex(16)}", secrets.randbits(62)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Now, and not at the first write, where a lack of memory would kill the process.
            os.posix_fallocate(descriptor, 0, _HEADER * 8 + size * 2 * SLOT)
            made = cls(path, 0, size, timeout)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        made._words[_NONCE] = nonce
        return made, path, nonce

    @classmethod
    def open(cls, path: Path, nonce: int, rank: int, size: int, timeout: float) -> Self | None:
        """Open the one that rank 0 made; None if it is not on this machine."""
        if not path.exists():
            return None
        found = cls(path, rank, size, timeout)
        return found if found._words[_NONCE] == nonce else None

    def exchange(self, piece: Tensor, tag: int) -> list[Tensor]:
        """Bring bytes; return those of every rank, which stay what they are until the next call.

        Args:
            piece: ``(bytes,)`` uint8, at most :data:`SLOT`.
            tag: says what it is.

        Raises:
            CommunicatorError: a rank brings something with another tag, or does not come.
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
        """Let every rank that waits, now or later, raise."""
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
