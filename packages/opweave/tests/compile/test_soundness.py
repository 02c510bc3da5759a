"""Compiled programs equal eager ones, with any aliasing and every kind of kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import opweave.compile
from opweave import ir

from . import programs
from .conftest import amounts
from .programs import ROWS, WIDTH, Ops, Program

FEW, MANY = 40, 2000  # programs for each provider
HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    with ir.isolated_registry():
        yield programs.declare()


def force(ops: Ops, provider: str) -> None:
    for op in (ops.norm, ops.add_norm, ops.halves):
        op.set_default([provider] if provider in op.impls else [])


def make_inputs(aliased: str) -> tuple[Tensor, Tensor]:
    base = torch.randn(2 * ROWS, WIDTH)
    if aliased == "same":
        return base[:ROWS], base[:ROWS]
    if aliased == "overlapping":
        return base[:ROWS], base[1 : ROWS + 1]
    if aliased == "expanded":
        return base[:1].expand(ROWS, WIDTH), base[1 : ROWS + 1]
    return base[:ROWS].clone(), base[ROWS:].clone()


def check(program: Program, aliased: str, **options: object) -> None:
    a, b = make_inputs(aliased)
    weight = torch.randn(WIDTH)
    before = a.clone(), b.clone(), weight.clone()
    with ir.priority({op.name: "native" for op in ir.current_registry().ops.values()}):
        expected = [value.clone() for value in program(a, b, weight)]
    torch.compiler.reset()
    compiled = torch.compile(
        program.__call__, backend=opweave.compile.backend, fullgraph=True, options=options
    )
    found = compiled(a, b, weight)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
        assert x.shape == y.shape
    for given_, kept in zip((a, b, weight), before, strict=True):
        assert torch.equal(given_, kept), "an input that was not donated has changed"


aliasing = st.sampled_from(["apart", "same", "overlapping", "expanded"])


@pytest.mark.parametrize("examples", amounts(FEW, MANY))
@pytest.mark.parametrize("provider", ["native", "functional", "inplace", "crossed", "opaque"])
def test_random_programs(ops: Ops, provider: str, examples: int) -> None:
    force(ops, provider)

    @settings(max_examples=examples, deadline=None, suppress_health_check=HEALTH)
    @given(program=programs.programs(ops), aliased=aliasing)
    def run(program: Program, aliased: str) -> None:
        with torch.no_grad():
            check(program, aliased, codegen=False)

    run()
