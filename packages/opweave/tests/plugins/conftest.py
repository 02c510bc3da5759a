"""Installs plugins into a folder of the test's own, and loads them in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from opweave import ir, registration
from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.loader import Loader

from . import helpers

Install = Callable[..., Loader]


@pytest.fixture
def installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: ir.Registry
) -> Iterator[Install]:
    """Install distributions, and return their loader: ``installed(plugin(...), policy=...)``.

    The registry of ops is the test's own, and modules are forgotten afterwards.
    """
    monkeypatch.syspath_prepend(tmp_path)
    for notes in ("_absences", "_ways_out"):
        monkeypatch.setattr(registration, notes, {})
    before = set(sys.modules)

    def install(*distributions: Mapping[str, str], policy: PluginPolicy | None = None) -> Loader:
        helpers.install(tmp_path, *distributions)
        return Loader(helpers.points_in(tmp_path), policy or PluginPolicy())

    yield install
    for name in set(sys.modules) - before:
        if name.partition(".")[0].endswith("_module"):
            del sys.modules[name]
