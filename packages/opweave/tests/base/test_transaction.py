"""Transactions over every registry, and owners."""

from __future__ import annotations

import contextvars
from contextlib import suppress

import pytest

from opweave import transaction
from opweave.errors import TransactionClosedError
from opweave.registration import Owner, current_owner, owned_by

ACME = Owner("acme", "acme-device", "0.1.0")


def test_a_failure_puts_former_entries_back_the_last_change_first() -> None:
    table, restored = {"a": 0, "b": 0}, list[str]()
    with suppress(KeyError), transaction.begin() as entered:
        transaction.enter("a", table, "a", 1, lambda: restored.append("a"))
        transaction.enter("a again", table, "a", 2, lambda: restored.append("a again"))
        transaction.enter("b", table, "b", None)
        transaction.enter("c", table, "c", 1)
        assert table == {"a": 2, "c": 1}
        table["c"] = 3  # another thread replaces it
        raise KeyError
    assert table == {"a": 0, "b": 0, "c": 3}
    assert restored == ["a again", "a"]
    assert not entered.registered


def test_success_keeps_everything() -> None:
    table: dict[str, int] = {}
    with transaction.begin() as entered:
        transaction.enter("a", table, "a", 1)
    transaction.enter("b", table, "b", 1)  # outside a transaction
    assert table == {"a": 1, "b": 1}
    assert entered.registered == ["a"]


def test_an_outer_block_includes_inner_ones_that_succeed() -> None:
    table: dict[str, int] = {}
    with suppress(KeyError), transaction.begin() as outer:
        with transaction.begin():
            transaction.enter("a", table, "a", 1)
        assert outer.registered == ["a"]
        with suppress(OSError), transaction.begin():
            transaction.enter("b", table, "b", 1)
            raise OSError
        assert table == {"a": 1}
        with transaction.detached():
            transaction.enter("c", table, "c", 1)
        raise KeyError
    assert table == {"c": 1}


def test_a_failed_transaction_refuses_registrations() -> None:
    table: dict[str, int] = {}
    with suppress(KeyError), transaction.begin():
        late = contextvars.copy_context()
        raise KeyError
    with pytest.raises(TransactionClosedError, match="late cannot be registered any more"):
        late.run(transaction.enter, "late", table, "late", 1)
    assert not table


def test_owners_nest() -> None:
    assert current_owner() is None
    with owned_by(ACME):
        assert current_owner() == ACME
        with owned_by(None):
            assert current_owner() is None
        assert current_owner() == ACME
    assert current_owner() is None
