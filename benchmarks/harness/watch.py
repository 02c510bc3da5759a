"""Sees when a core is not all ours, which no counter of a virtual machine tells.

Who computes on the other hyperthread of a core, another guest of the host, say, halves what it can
do for as long as that lasts. A fixed piece of work then takes longer than it ever did. Every thread
does its part of it, as the core of any may be disturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from harness.timing import microseconds

T = TypeVar("T")

_MUCH_LONGER = 1.25  # other hyperthreads make it 1.4 to 1.7, the clock's changes 1.1
_TABLE = 2**12
_SHARED = 2**15  # numbers that torch gives to a thread at least
_REPEATS = 8
_FIRST_LOOK = 1.0  # seconds


class Watch:
    """Repeats what was disturbed, while its patience lasts.

    Args:
        patience: seconds that this may take, until :meth:`renew` is called.

    Attributes:
        seconds: how many it took.
        taken: how often something was measured.
        repeated: how often something was disturbed, and measured again.
        kept: how often something was disturbed, and there was no patience left.
    """

    def __init__(self, patience: float) -> None:
        threads = torch.get_num_threads()
        size = _TABLE if threads == 1 else _SHARED * threads
        table, indices = torch.rand(_TABLE), torch.randint(0, _TABLE, (size,))
        self._work = partial(torch.take, table, indices, out=torch.empty(size))
        self._least = math.inf
        self._patience = self._left = patience
        self.seconds, self.taken, self.repeated, self.kept = 0.0, 0, 0, 0
        end = time.perf_counter() + _FIRST_LOOK
        while time.perf_counter() < end:
            self.is_quiet()

    def clock(self) -> float:
        """Return the time in seconds, without what was lost."""
        return time.perf_counter() - self.seconds

    def renew(self, times: int = 1) -> None:
        """Have *times* as much patience as at first."""
        self._left = times * self._patience

    def summary(self) -> dict[str, float]:
        """Return what the attributes say."""
        return {
            "taken": self.taken, "repeated": self.repeated, "kept": self.kept,
            "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def undisturbed(self, take: Callable[[], T]) -> T:
        """Return what *take* returns while nobody disturbs it, or once no patience is left."""
        self.taken += 1
        while True:
            self._wait()
            start = time.perf_counter()
            found = take()
            if self.is_quiet():
                return found
            if self._left <= 0:
                self.kept += 1
                return found
            self.repeated += 1
            self._lose(start)

    def is_quiet(self) -> bool:
        """Whether looking numbers up takes about as long as it took at the least."""
        took = min(self._look_up() for _ in range(_REPEATS))
        self._least = min(self._least, took)
        return took < _MUCH_LONGER * self._least

    def _wait(self) -> None:
        start = time.perf_counter()
        while self._left > 0 and not self.is_quiet():
            self._lose(start)
            start = time.perf_counter()

    def _lose(self, start: float) -> None:
        seconds = time.perf_counter() - start
        self._left -= seconds
        self.seconds += seconds

    def _look_up(self) -> float:
        return microseconds(self._work, [()])
