"""Transactions over every registry, and owners."""

from __future__ import annotations

from contextlib import suppress

from opweave import transaction
from opweave.registration import Owner, current_owner, owned_by

ACME = Owner("acme", "acme-device", "0.1.0")


def test_the_last_is_undone_first() -> None:
    undone: list[str] = []
    with suppress(KeyError), transaction.begin():
        transaction.enter("a", lambda: undone.append("a"))
        transaction.enter("b", lambda: undone.append("b"))
        raise KeyError
    assert undone == ["b", "a"]


def test_success_keeps_everything() -> None:
    undone: list[str] = []
    with transaction.begin() as entered:
        transaction.enter("a", lambda: undone.append("a"))
    assert entered.registered == ["a"]
    assert not undone
    transaction.enter("b", lambda: undone.append("b"))  # nobody would undo it
    assert not undone


def test_the_outer_undoes_the_inner_too() -> None:
    undone: list[str] = []
    with suppress(KeyError), transaction.begin() as outer:
        with transaction.begin():
            transaction.enter("a", lambda: undone.append("a"))
        assert outer.registered == ["a"]
        with suppress(OSError), transaction.begin():
            transaction.enter("b", lambda: undone.append("b"))
            raise OSError
        assert undone == ["b"]
        with transaction.detached():
            transaction.enter("c", lambda: undone.append("c"))
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
