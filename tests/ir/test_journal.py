"""Transactions over every registry, and owners."""

from __future__ import annotations

from contextlib import suppress

from opweave.ir import journal
from opweave.ir.owner import Owner, current_owner, owned_by

ACME = Owner("acme", "acme-device", "0.1.0")


def test_the_last_is_undone_first() -> None:
    undone: list[str] = []
    with suppress(KeyError), journal.transaction():
        journal.enter("a", lambda: undone.append("a"))
        journal.enter("b", lambda: undone.append("b"))
        raise KeyError
    assert undone == ["b", "a"]


def test_success_keeps_everything() -> None:
    undone: list[str] = []
    with journal.transaction() as entered:
        journal.enter("a", lambda: undone.append("a"))
    assert entered.registered == ["a"]
    assert not undone
    journal.enter("b", lambda: undone.append("b"))  # nobody would undo it
    assert not undone


def test_the_outer_undoes_the_inner_too() -> None:
    undone: list[str] = []
    with suppress(KeyError), journal.transaction() as outer:
        with journal.transaction():
            journal.enter("a", lambda: undone.append("a"))
        assert outer.registered == ["a"]
        with suppress(OSError), journal.transaction():
            journal.enter("b", lambda: undone.append("b"))
            raise OSError
        assert undone == ["b"]
        with journal.detached():
            journal.enter("c", lambda: undone.append("c"))
        raise KeyError
    assert undone == ["b", "a"]


def test_owners_nest() -> None:
    assert current_owner() is None
    with owned_by(ACME):
        assert current_owner() == ACME
        with owned_by(None):
            assert current_owner() is None
        assert current_owner() == ACME
    assert current_owner() is None
