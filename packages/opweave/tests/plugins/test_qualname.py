"""Objects by qualified name."""

from __future__ import annotations

import os.path
from pathlib import Path

import pytest

from opweave.plugins import Claim, resolve_obj_by_qualname
from opweave.plugins.entry import ReferenceNameError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("opweave.plugins.Claim", Claim),
        ("opweave.plugins:Claim", Claim),
        ("os.path.join", os.path.join),
        ("pathlib:Path.exists", Path.exists),
    ],
)
def test_both_forms(name: str, found: object) -> None:
    assert resolve_obj_by_qualname(name) is found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.path.jion", "os.path has no 'jion'. Did you mean 'join'"),
        ("nowhere.Thing", "no module 'nowhere'"),
        ("os.nowhere.Thing", "no module 'os.nowhere'"),
        ("Thing", "not a qualified name"),
        ("", "not a qualified name"),
        ("a b.c", "not a qualified name"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(ReferenceNameError, match=message):
        resolve_obj_by_qualname(name)


def test_what_a_module_lacks_is_not_blamed_on_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_here") as caught:
        resolve_obj_by_qualname("needs_more.Thing")
    assert not isinstance(caught.value, ReferenceNameError)
