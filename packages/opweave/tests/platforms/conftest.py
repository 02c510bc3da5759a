"""Fixtures of the tests of platforms: a platform that can be changed, and packages to install."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import pytest

from opweave import platforms
from opweave.platforms import Platform
from opweave.platforms.resolution import isolated_resolution
from support.fixtures import Case


@pytest.fixture
def unresolved() -> Iterator[None]:
    """Nobody has asked for the current platform yet."""
    with isolated_resolution():
        yield


class Acme(Platform):
    """A platform of another package; its device is the CPU."""

    name = "acme"
    device_type = "cpu"


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Acme:
    """An object that is the current platform during the test."""
    platform = Acme()
    monkeypatch.setattr(platforms, "current_platform", platform)
    return platform


def installed(
    code: str,
    points: Mapping[str, Mapping[str, str]],
    files: Mapping[str, str],
    env: Mapping[str, str] | None = None,
) -> Case:
    """Return a case in which acme-device 0.1.0 is installed, with these entry points and files."""
    lines = [
        line
        for group, entries in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: acme-device\nVersion: 0.1.0\n",
        "entry_points.txt": "\n".join(lines),
    }
    written = {name: textwrap.dedent(text) for name, text in files.items()}
    described = {f"acme_device-0.1.0.dist-info/{name}": text for name, text in info.items()}
    here = "import sys; sys.path.insert(0, os.getcwd())\n"
    return Case(here + textwrap.dedent(code), env or {}, {**written, **described})
