"""Every name of the seed document's list is registered."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import opweave.layers

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "shared" / "seeds" / "000_260d1579a7b1b8f4.txt"
LISTED = (HERE / "seed_names.txt").read_text(encoding="utf-8").splitlines()
NAMES = [line for line in LISTED if line and not line.startswith("#")]


def test_the_list_is_the_documents() -> None:
    if not DOCUMENT.is_file():
        pytest.skip("the seed document is not in this checkout's surroundings")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert sorted(re.findall(r'--8<-- "[^"]*:(\w+)"', text)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_is_registered(name: str) -> None:
    layer = opweave.layers.op_registry[name]
    assert issubclass(layer, (opweave.layers.CustomOp, opweave.layers.PluggableLayer))
    assert layer.__dict__["name"] == name
    assert layer.__doc__


def calls(file: Path) -> set[str]:
    """The names that a test module calls, or hands on to be called: ``Layer(...)``, ``[Layer]``."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return loaded | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


ORACLES = ("transformers", "nn", "functional", "oracle", "expected", "wanted", "reference")
CALLED = {file.name: calls(file) for file in HERE.glob("*.py") if file != Path(__file__)}


@pytest.mark.parametrize("name", NAMES)
def test_each_is_built_and_compared(name: str) -> None:
    """Whether the values are right is for those tests; this one finds a layer that has none."""
    layer = opweave.layers.op_registry[name].__name__
    files = [file for file, called in CALLED.items() if layer in called]
    assert any(set(ORACLES) & CALLED[file] for file in files), f"nothing tests {layer}: {files}"
