"""How the body of a job gets the device for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ask: Callable[[str], None] | None = None
_tell: Callable[[str], None] | None = None


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other job uses the device, and keep it so inside the block.

    Time spent waiting does not count against the job's limit. Load, compile and warm up before.
    """
    if _ask is not None:
        _ask("hold")
    try:
        yield
    finally:
        if _ask is not None:
            _ask("release")


def at(place: str) -> None:
    """Say what the job does next: a crash is reported with it."""
    if _tell is not None:
        _tell(place)


def connect(ask: Callable[[str], None], tell: Callable[[str], None]) -> None:
    """Let *ask* negotiate with the program that started this process; *tell* it the place."""
    global _ask, _tell
    _ask, _tell = ask, tell
