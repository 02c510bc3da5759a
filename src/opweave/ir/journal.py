"""What is registered inside a block, and how to take it back if the block fails.

Every registry enters each of its registrations here, in one line. So a plugin that fails half-way
leaves nothing behind, whatever it registered, and a report can say what a plugin registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opweave.ir.errors import TransactionClosedError
from opweave.ir.owner import current_owner, is_own_import


class Journal:
    """The registrations of one block, in order.

    Attributes:
        registered: what was registered, such as ``"op acme_scale"``.
        of_plugin: whether the block is a plugin's.
    """

    def __init__(self, *, of_plugin: bool = False) -> None:
        self.of_plugin = of_plugin
        self.registered: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._closed = ""

    def add(self, what: str, undo: Callable[[], None]) -> None:
        """Enter a registration.

        Raises:
            TransactionClosedError: the block has ended; the registration is taken back.
        """
        if self._closed:
            undo()
            raise TransactionClosedError(f"{what} cannot be registered any more: {self._closed}.")
        self.registered.append(what)
        self._undo.append(undo)

    def roll_back(self) -> None:
        """Take everything back, the last registration first."""
        while self._undo:
            self._undo.pop()()
        self.registered.clear()

    def close(self, reason: str) -> None:
        """Refuse further registrations, as of a thread that the block has left behind."""
        self._closed = reason

    def include(self, inner: Journal) -> None:
        """Make the registrations of *inner*, which has succeeded, part of this block."""
        for what, undo in zip(inner.registered, inner._undo, strict=True):
            self.add(what, undo)


_journal: ContextVar[Journal | None] = ContextVar("journal", default=None)


def is_recording() -> bool:
    """Return whether what is registered here and now may be taken back."""
    return _journal.get() is not None


def enter(what: str, undo: Callable[[], None]) -> None:
    """Enter a registration that was just made; outside a transaction, nothing is kept.

    Nor is, in a plugin's, what opweave's own modules register when the plugin imports them: they
    are there to stay.

    Raises:
        TransactionClosedError: the transaction has ended; the registration is taken back.
    """
    journal = _journal.get()
    if journal is not None and not (journal.of_plugin and is_own_import()):
        journal.add(what, undo)


@contextmanager
def transaction() -> Iterator[Journal]:
    """Take back everything that is registered inside the block if the block raises."""
    outer, inner = _journal.get(), Journal(of_plugin=current_owner() is not None)
    token = _journal.set(inner)
    try:
        yield inner
    except BaseException:
        inner.close("its transaction has failed")
        inner.roll_back()
        raise
    finally:
        _journal.reset(token)
    if outer is not None:
        outer.include(inner)


@contextmanager
def detached() -> Iterator[None]:
    """Keep what is registered inside the block, whatever becomes of the transaction around it."""
    token = _journal.set(None)
    try:
        yield
    finally:
        _journal.reset(token)
