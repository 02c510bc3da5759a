"""Every name of the seed document's list is registered."""

from __future__ import annotations

from pathlib import Path

import opweave.layers

LISTED = Path(__file__).with_name("seed_names.txt").read_text(encoding="utf-8").splitlines()
NAMES = [line for line in LISTED if not line.startswith("#")]


def test_each_is_registered() -> None:
    for name in NAMES:
        layer = opweave.layers.op_registry[name]
        assert issubclass(layer, (opweave.layers.CustomOp, opweave.layers.PluggableLayer))
        assert layer.__dict__["name"] == name
        assert layer.__doc__
