"""Fixtures of the tests of the layers' machinery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opweave import platforms
from opweave.config import CompilationConfig, compilation_config
from opweave.layers import op_registry, op_registry_oot
from opweave.platforms import (
    CpuPlatform,
    CudaPlatform,
    Platform,
    RocmPlatform,
    TpuPlatform,
    XpuPlatform,
)


@pytest.fixture
def registries() -> Iterator[None]:
    """Forget what the test registers."""
    saved = [(table, dict(table)) for table in (op_registry, op_registry_oot)]
    yield
    for table, entries in saved:
        table.clear()
        table.update(entries)


@pytest.fixture
def config() -> Iterator[CompilationConfig]:
    """A configuration that holds during the test, with counters of its own."""
    with compilation_config(CompilationConfig()) as current:
        yield current


TAGS = {
    each.name: each.dispatch_tags
    for each in (CpuPlatform, CudaPlatform, RocmPlatform, TpuPlatform, XpuPlatform)
} | {"unspecified": ("native",)}


class Named(CpuPlatform):
    """A platform of some name; its device is the CPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dispatch_tags = TAGS.get(name, Platform.dispatch_tags)


@pytest.fixture
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The platform of the name that the test is parametrized with is the current one."""
    name: str = request.param
    monkeypatch.setattr(platforms, "current_platform", Named(name))
    return name
