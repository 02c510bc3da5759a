"""The random programs of ``tests/runs/programs``, a few of them and many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opweave import ir
from runs.programs.examine import examine
from runs.programs.kernels import Library, open_library


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with ir.isolated_registry():
        yield open_library()


def check(library: Library, seeds: range, codegen: bool) -> None:
    found = [each for seed in seeds for each in examine(seed, library, 8, codegen)[1]]
    assert [each.to_json() for each in found if not each.torch] == []


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
def test_a_few_programs(library: Library) -> None:
    check(library, range(3), codegen=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
@pytest.mark.parametrize("codegen", [False, True])
def test_many_programs(library: Library, codegen: bool) -> None:
    check(library, range(1000, 1025), codegen)
