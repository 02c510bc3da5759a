"""Where verifying is: told before each step, since the step may end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opweave.conformance.case import Case

_listeners: list[Callable[[str], None]] = []


@contextmanager
def told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Call *listener* with the check, and with each case of it, inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def arrived(at: Case | str) -> None:
    """Tell the listeners which case, or which check, comes next."""
    for listener in _listeners:
        listener(str(at))
