"""The random programs of ``tests/runs/programs.py``, a few of them and many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opweave import ir
from runs.programs import examine

from .programs import Ops, declare


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    with ir.isolated_registry():
        yield declare()


def check(ops: Ops, seeds: range, codegen: bool) -> None:
    found = [examine(seed, ops, codegen) for seed in seeds]
    assert [each for each in found if each and not each["torch"]] == []


def test_a_few_programs(ops: Ops) -> None:
    check(ops, range(6), codegen=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codegen", [False, True])
def test_many_programs(ops: Ops, codegen: bool) -> None:
    check(ops, range(1000, 1200), codegen)
