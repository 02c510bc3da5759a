"""The native module must be there: a test run without it proves nothing about it.

Set ``TEST_EXPECT_NATIVE=0`` where opweave was built without the native module on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from opweave import native
from opweave.native import NativeModule

from . import kit_module

ISAS = native.status().isa_levels or ("missing",)  # the best first
# `make test` runs the first and the last; fuzz tests draw from all of them there, too.
_EACH_ISA = [
    pytest.param(isa, marks=[pytest.mark.slow] if isa in ISAS[1:-1] else []) for isa in ISAS
]


@pytest.fixture(scope="session")
def module() -> ModuleType:
    found = native.module()
    if found is None and os.environ.get("TEST_EXPECT_NATIVE") == "0":
        pytest.skip(f"TEST_EXPECT_NATIVE=0 and {native.status().reason_missing}")
    assert found is not None, native.status().reason_missing
    return found


@pytest.fixture(params=_EACH_ISA)
def isa(request: pytest.FixtureRequest, module: ModuleType) -> Iterator[str]:
    """Run the test once per instruction set of this CPU; all but the best and base are slow."""
    before = module._isa()
    module._select_isa(request.param)
    yield request.param
    module._select_isa(before)


@pytest.fixture
def isas(module: ModuleType) -> Iterator[tuple[str, ...]]:
    """The instruction sets of this CPU, for a test that selects them by itself."""
    yield module._available_isas()
    module._select_isa(None)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def native_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for the modules that the tests build, empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWEAVE_CACHE_DIR", str(folder))
        patch.setenv("CXX", kit_module.logging_compiler(tmp_path_factory.mktemp("compiler")))
        yield folder


@pytest.fixture(scope="session")
def kit(native_cache: Path) -> NativeModule:
    """The module with every kind of argument."""
    return kit_module.load()
