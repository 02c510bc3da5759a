"""The native module must be there: a test run without it proves nothing about it.

Set ``OPWEAVE_EXPECT_NATIVE=0`` where opweave was built without the native module on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from opweave import native

ISAS = native.status().isa_levels or ("missing",)


@pytest.fixture(scope="session")
def module() -> ModuleType:
    found = native.load()
    if found is None and os.environ.get("OPWEAVE_EXPECT_NATIVE") == "0":
        pytest.skip(f"OPWEAVE_EXPECT_NATIVE=0 and {native.status().reason_missing}")
    assert found is not None, native.status().reason_missing
    return found


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, module: ModuleType) -> Iterator[str]:
    """Run the test once per instruction set of this CPU."""
    before = module._isa()
    module._select_isa(request.param)
    yield request.param
    module._select_isa(before)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield
