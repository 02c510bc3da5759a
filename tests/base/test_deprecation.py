"""Old import paths of moved modules work, and warn."""

from __future__ import annotations

import importlib

import pytest

from opweave.base import owner, transaction


@pytest.mark.parametrize(
    ("old", "name", "current"),
    [
        ("opweave.ir.owner", "owned_by", owner.owned_by),
        ("opweave.ir.journal", "enter", transaction.enter),
        ("opweave.ir.journal", "transaction", transaction.begin),
        ("opweave.ir.journal", "Journal", transaction.Transaction),
    ],
)
def test_a_moved_name_works_and_warns(old: str, name: str, current: object) -> None:
    module = importlib.import_module(old)
    with pytest.warns(DeprecationWarning, match=rf"{old}\.{name} is deprecated; use opweave\.base"):
        assert getattr(module, name) is current
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        module.unknown  # noqa: B018


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("opweave.plugins", "Candidate", "PlatformCandidate"),
        ("opweave.plugins", "Group", "PluginGroup"),
        ("opweave.layers.moe", "QuantConfig", "FusedMoEQuantConfig"),
        ("opweave.ir.errors", "InvalidArgumentError", "TensorArgumentError"),
    ],
)
def test_a_renamed_class_works_and_warns(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is deprecated; use .*\.{new}"):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        found.unknown  # noqa: B018
