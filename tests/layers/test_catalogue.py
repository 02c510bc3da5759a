"""Every name of the seed document's list is registered."""

from __future__ import annotations

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
