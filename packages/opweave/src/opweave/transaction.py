"""Transactions of registrations: a block that fails leaves every registry as it was.

Every registry enters its entries with :func:`enter`, which takes a snapshot of the former entry. So
the registrations of a plugin that fails halfway are taken back, and a report can list them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from opweave.errors import TransactionClosedError
from opweave.registration import bound, current_owner, is_own_import


class _Change(NamedTuple):
    table: MutableMapping[Any, Any]
    key: Any
    former: Any
    value: Any
    restored: Callable[[], object]


class Transaction:
    """The registrations of one block, in order.

    Attributes:
        registered: the registrations, such as ``"op acme_scale"``.
        of_plugin: whether the block is a plugin's.
    """

    def __init__(self, *, of_plugin: bool = False) -> None:
        self.of_plugin = of_plugin
        self.registered: list[str] = []
        self._changes: list[_Change] = []
        self._closed = ""

    def check_open(self, label: str) -> None:
        """Raise :class:`TransactionClosedError` if the block has failed."""
        if self._closed:
            raise TransactionClosedError(f"{label} cannot be registered any more: {self._closed}.")

    def add(self, label: str, change: _Change) -> None:
        self.registered.append(label)
        self._changes.append(change)

    def roll_back(self) -> None:
        """Put the former entries back, the last change first."""
        while self._changes:
            table, key, former, value, restored = self._changes.pop()
            if table.get(key) is value:  # not replaced since
                _assign(table, key, former)
                restored()
        self.registered.clear()

    def close(self, reason: str) -> None:
        """Refuse further registrations, such as those of a thread that outlives the block."""
        self._closed = reason

    def include(self, inner: Transaction) -> None:
        """Make the registrations of *inner*, which has succeeded, part of this block."""
        self.registered += inner.registered
        self._changes += inner._changes


_current: ContextVar[Transaction | None] = ContextVar("transaction", default=None)


def enter(
    label: str,
    table: MutableMapping[Any, Any],
    key: Any,
    value: Any,
    restored: Callable[[], object] = lambda: None,
) -> None:
    """Set ``table[key]`` to *value*, or remove the entry if it is None.

    If the enclosing transaction fails, the former entry is put back. Registrations that opweave's
    own modules make because a plugin imports them do not belong to the plugin's transaction.

    Args:
        label: the registration for reports, such as ``"op acme_scale"``.
        table: the registry's table.
        key: the key of the entry.
        value: the new entry.
        restored: called after the former entry was put back.

    Raises:
        TransactionClosedError: the transaction has failed; nothing is registered.
    """
    transaction, former = _current.get(), table.get(key)
    if transaction is not None and not (transaction.of_plugin and is_own_import()):
        transaction.check_open(label)
        transaction.add(label, _Change(table, key, former, value, restored))
    _assign(table, key, value)


def _assign(table: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


@contextmanager
def begin() -> Iterator[Transaction]:
    """Take back everything that is registered inside the block if the block raises."""
    outer, inner = _current.get(), Transaction(of_plugin=current_owner() is not None)
    with bound(_current, inner):
        try:
            yield inner
        except BaseException:
            inner.close("its transaction has failed")
            inner.roll_back()
            raise
    if outer is not None:
        outer.include(inner)


def detached() -> AbstractContextManager[None]:
    """Keep what the block registers, even if the enclosing transaction fails."""
    return bound(_current, None)
