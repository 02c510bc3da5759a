"""The page on equal tokens says what is tested: each clause, for each family of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from engine import test_equality
from models.tiny_checkpoints import Checkpoints
from opweave_engine.models import CausalLM, model_class, supported_architectures
from support import ROOT

PAGE = ROOT / "docs" / "design" / "tokens.md"


def table(first: str) -> list[dict[str, str]]:
    """Return the rows of the table whose first column has that name, by column."""
    lines = PAGE.read_text(encoding="utf-8").split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip(" |").split(" | ")]
        for line in f"{first} |{lines}".splitlines()
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


def marks(test: Callable[..., None]) -> list[pytest.Mark]:
    found: list[pytest.Mark] = getattr(test, "pytestmark", [])
    return found


def cases(test: Callable[..., None]) -> Iterator[tuple[str, bool]]:
    """Yield the kind of each case of *test*, and whether it is slow."""
    for mark in marks(test):
        names = mark.args[0] if mark.name == "parametrize" else ()
        names = [names] if isinstance(names, str) else list(names)
        if "kind" in names:
            for given in mark.args[1]:
                values = getattr(given, "values", given if len(names) > 1 else (given,))
                is_slow = any(each.name == "slow" for each in getattr(given, "marks", ()))
                yield values[names.index("kind")], is_slow


CLAUSES = table("clause")
FAMILIES = table("family")


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause["clause"])
def test_a_clause_is_tested_for_each_family(clause: dict[str, str]) -> None:
    test = getattr(test_equality, clause["test"].strip("`"))
    assert not any(mark.name in ("slow", "skip", "xfail") for mark in marks(test))
    found: dict[str, str] = {}
    for kind, is_slow in cases(test):
        found[kind] = "slow" if is_slow and found.get(kind) != "yes" else "yes"
    assert found == {row["family"].strip("`"): row[clause["clause"]] for row in FAMILIES}


def test_every_clause_is_on_the_page() -> None:
    tests = {name for name in vars(test_equality) if name.startswith("test_")}
    assert tests == {clause["test"].strip("`") for clause in CLAUSES}
    for row in FAMILIES:
        assert list(row)[2:] == [clause["clause"] for clause in CLAUSES]


def test_every_model_that_writes_text_is_a_family(checkpoint: Checkpoints) -> None:
    for row in FAMILIES:
        path = checkpoint(row["family"].strip("`"))[0]
        written = json.loads((path / "config.json").read_text(encoding="utf-8"))
        assert written["architectures"] == [row["model"].strip("`")]
    own = {name: model_class({"architectures": [name]}) for name in supported_architectures()}
    assert {row["model"].strip("`") for row in FAMILIES} == {
        name
        for name, model in own.items()
        if issubclass(model, CausalLM)
        and model.__module__.startswith("opweave_engine.")
        # served as the language model that it derives from, on that model's row
        and model.__mro__[1] not in own.values()
    }
