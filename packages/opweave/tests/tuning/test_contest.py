"""Implementations against each other: verified first, then timed; and the arguments for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.conformance import Case
from opweave.tuning import Effort, Measurement, TuningError, contest, record_calls
from opweave.tuning.cases import Sized, generated, traced
from opweave.tuning.measure import relative_error
from opweave.tuning.timing import Time

QUICK = Effort(rounds=2, seconds=1e-5)
SMALL = {"hidden_size": 32}


def measured(op: ir.IrOp, *values: object) -> dict[str, Measurement]:
    found = contest(Case(op, "", op.bind(*values)), effort=QUICK)
    return {m.provider: m for m in found}


def test_every_implementation_has_its_outcome() -> None:
    found = measured(ir.ops.rms_norm, torch.randn(4, 32), torch.ones(32), 1e-6)
    assert found.keys() == ir.ops.rms_norm.impls.keys()
    for provider in ("native", "aten", "opweave_c", "batch_invariant"):
        assert (found[provider].status, found[provider].reason) == ("passed", "")
        assert found[provider].error == pytest.approx(1e-7, abs=1e-6)
        assert found[provider].bytes == 4 * (2 * 4 * 32 + 32)
    if found["triton"].status == "rejected":
        assert found["triton"].reason
        assert found["triton"].time is None


@pytest.fixture
def doubled() -> Iterator[ir.IrOp]:
    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True)
        def doubled(x: Tensor) -> Tensor:
            return x * 2

        @doubled.register_impl("wrong")
        def _(x: Tensor) -> Tensor:
            return x * 2.1

        @doubled.register_impl("exits")
        def _(x: Tensor) -> Tensor:
            raise SystemExit(3)

        @doubled.register_impl("doubts", supports_args=lambda x: 1 / 0)
        def _(x: Tensor) -> Tensor:
            return x * 2

        @doubled.register_impl("inplace", inplace=True)
        def _(x: Tensor) -> Tensor:
            return x.mul_(2)

        yield doubled


def test_wrong_implementations_are_not_timed(doubled: ir.IrOp) -> None:
    x = torch.randn(4, 8)
    before = x.clone()
    found = measured(doubled, x)
    assert {p: (m.status, m.time is not None) for p, m in found.items()} == {
        "native": ("passed", True), "wrong": ("failed", False), "exits": ("failed", False),
        "doubts": ("rejected", False), "inplace": ("passed", True),
    }  # fmt: skip
    assert "SystemExit" in found["exits"].reason
    assert "its predicate raised" in found["doubts"].reason
    assert torch.equal(x, before)


def test_integer_activations_do_not_advance() -> None:
    sized = next(generated(ir.ops.advance_step_flashattn, (4,)))
    found = contest(sized.case, effort=Effort(rounds=20, seconds=1e-4))
    assert {m.status for m in found} <= {"passed", "rejected"}  # no sequence outgrows its table


def test_stages_are_announced(doubled: ir.IrOp) -> None:
    stages: list[tuple[str, str]] = []
    case = Case(doubled, "", (torch.randn(2, 2),))
    contest(case, ["native", "wrong"], QUICK, lambda *stage: stages.append(stage))
    assert stages[:3] == [
        ("native", "verifying"), ("wrong", "verifying"), ("native", "timing")
    ]  # fmt: skip
    assert ("wrong", "timing") not in stages


def test_bandwidth() -> None:
    found = Measurement("mine", "passed", time=Time(2.0, 0.0), bytes=6000)
    assert found.bytes_per_second == 3e9
    assert replace(found, bytes=None).bytes_per_second is None


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = torch.tensor([3.0, 4.5])
    assert relative_error((found,), (reference,)) == pytest.approx(0.1)
    assert relative_error((reference, found), (reference, reference)) == pytest.approx(0.1)
    codes = torch.tensor([1, 2], dtype=torch.int8)
    assert relative_error((codes,), (codes,)) == 0


def shapes(found: Iterator[Sized]) -> list[tuple[int, ...]]:
    return [tuple(sized.case.values[0].shape) for sized in found]


def test_generated_cases_have_the_sizes() -> None:
    op = ir.ops.rms_norm
    assert shapes(generated(op, (1, 3))) == [(1, 4096), (3, 4096)]
    assert shapes(generated(op, (2,), SMALL)) == [(2, 32)]
    dtypes = {next(generated(op, (2,), SMALL, d)).case.values[0].dtype for d in (None, torch.half)}
    assert dtypes == {torch.bfloat16, torch.half}


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(TuningError, match="head_size=7"):
        next(generated(ir.ops.rotary_embedding, (2,), {"head_size": 7, "rotary_size": 16}))


def test_an_op_without_a_generator_needs_a_trace(doubled: ir.IrOp) -> None:
    with pytest.raises(TuningError, match="doubled has no input generator"):
        next(generated(doubled))


def test_traced_cases_are_the_distinct_calls() -> None:
    with record_calls() as recorder:
        for tokens in (2, 5, 2):
            ir.ops.silu_and_mul(torch.randn(tokens, 8))
    found = list(traced(ir.ops.silu_and_mul, recorder.trace))
    assert [sized.tokens for sized in found] == [2, 5]
    with pytest.raises(TuningError, match="no call of rms_norm; it has silu_and_mul"):
        next(traced(ir.ops.rms_norm, recorder.trace))
