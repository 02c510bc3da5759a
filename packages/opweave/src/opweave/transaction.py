"""Transactions of registrations: everything a block registers is undone if the block fails.

Every registry calls :func:`enter` for each registration. So the registrations of a plugin that
fails halfway are undone, and a report can list the registrations of a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opweave.errors import TransactionClosedError
from opweave.registration import current_owner, is_own_import


class Transaction:
    """The registrations of one block, in order.

    Attributes:
        registered: the registrations, such as ``"op acme_scale"``.
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
            TransactionClosedError: the block has ended; the registration is undone.
        """
        if self._closed:
            undo()
            raise TransactionClosedError(f"{what} cannot be registered any more: {self._closed}.")
        self.registered.append(what)
        self._undo.append(undo)

    def roll_back(self) -> None:
        """Undo every registration, the last one first."""
        while self._undo:
            self._undo.pop()()
        self.registered.clear()

    def close(self, reason: str) -> None:
        """Refuse further registrations, such as those of a thread that outlives the block."""
        self._closed = reason

    def include(self, inner: Transaction) -> None:
        """Make the registrations of *inner*, which has succeeded, part of this block."""
        for what, undo in zip(inner.registered, inner._undo, strict=True):
            self.add(what, undo)


_current: ContextVar[Transaction | None] = ContextVar("transaction", default=None)


def is_recording() -> bool:
    """Return whether a transaction is open."""
    return _current.get() is not None


def enter(what: str, undo: Callable[[], None]) -> None:
    """Enter a registration that was just made, with the function that undoes it.

    No-op outside a transaction. Registrations that opweave's own modules make because a plugin
    imports them do not belong to the plugin's transaction.

    Raises:
        TransactionClosedError: the transaction has ended; the registration is undone.
    """
    transaction = _current.get()
    if transaction is not None and not (transaction.of_plugin and is_own_import()):
        transaction.add(what, undo)


@contextmanager
def begin() -> Iterator[Transaction]:
    """Undo everything that is registered inside the block if the block raises."""
    outer, inner = _current.get(), Transaction(of_plugin=current_owner() is not None)
    token = _current.set(inner)
    try:
        yield inner
    except BaseException:
        inner.close("its transaction has failed")
        inner.roll_back()
        raise
    finally:
        _current.reset(token)
    if outer is not None:
        outer.include(inner)


@contextmanager
def detached() -> Iterator[None]:
    """Keep what the block registers, even if the enclosing transaction fails."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
