"""Ctrl-C that ends one piece of work, and not the program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second Ctrl-C acts as always.

    The work is not torn apart: it looks when it is in order. Only the main thread may use this.
    """
    before = signal.getsignal(signal.SIGINT)
    is_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, before)
