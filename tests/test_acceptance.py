"""The page that says which test shows what names tests that exist, and leaves no row without."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from support import ROOT, TEST_ROOTS

PAGE = ROOT / "docs" / "design" / "acceptance.md"
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")
ROWS = [
    line
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| requirement |")
]


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    path = next(path for root in TEST_ROOTS if (path := root / file).exists())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def can_fail(test: ast.FunctionDef) -> bool:
    """Whether a test compares something itself, or by what it calls, and is not skipped."""
    marks = {ast.unparse(mark).partition("(")[0] for mark in test.decorator_list}
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Assert | ast.Call)]
    return bool(calls) and not marks & {"pytest.mark.skip", "pytest.mark.xfail"}


def test_every_requirement_is_listed() -> None:
    assert len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_a_row_names_tests_that_exist(row: str) -> None:
    found = NAME.findall(row)
    assert found
    for file, name in found:
        assert name in functions_of(file), f"{file} has no {name}"
        assert can_fail(functions_of(file)[name])


def test_the_text_names_tests_that_exist() -> None:
    for file, name in NAME.findall(PAGE.read_text(encoding="utf-8")):
        assert name in functions_of(file)
