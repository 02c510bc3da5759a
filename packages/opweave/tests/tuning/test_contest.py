"""Implementations against each other: verified first, then timed; and the arguments for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.conformance import Case
from opweave.tuning import (
    Effort,
    Machine,
    Measurement,
    Task,
    Trace,
    TuningError,
    TuningFile,
    contest,
    record_calls,
    tune,
)
from opweave.tuning.cases import Sized, generated, traced
from opweave.tuning.measure import relative_error
from opweave.tuning.timing import Time, chance, compare, disturbance

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


def test_calls_through_the_op_are_timed_with_their_rule_and_wrapper(doubled: ir.IrOp) -> None:
    def is_small(x: Tensor) -> bool:
        time.sleep(0.002)
        return True

    @doubled.register_impl("slow_rule", supports_args=is_small)
    def _(x: Tensor) -> Tensor:
        return x * 2

    case = Case(doubled, "", (torch.randn(4, 8),))
    found = contest(case, ["native", "slow_rule", "inplace"], QUICK, with_calls=True)
    native, slow, inplace = found
    assert slow.time is not None
    assert slow.call_time is not None
    assert slow.call_time.microseconds > 2000 > slow.time.microseconds
    for m in (native, inplace):
        assert m.call_time is not None
    assert all(m.call_time is None for m in contest(case, ["native"], QUICK))


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


# Tuning in a subprocess: crashes are excluded, and a run continues where the last one ended.


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("busy", "disturbance"):
        monkeypatch.setattr(f"opweave.tuning.tuning_file.{name}", lambda: None)


HERE = Machine("cpu", "a processor", "amx", 2, "2.13", "0.1")

KERNELS = """
import ctypes, time
import torch
from opweave import ir

native = ir.ops.silu_and_mul.native

@ir.ops.silu_and_mul.register_impl("segfaults")
def segfaults(x):
    ctypes.string_at(0)
    return native(x)

@ir.ops.silu_and_mul.register_impl("hangs")
def hangs(x):
    time.sleep(60)
    return native(x)

@ir.ops.silu_and_mul.register_impl("wrong")
def wrong(x):
    return native(x) + 1

@ir.ops.silu_and_mul.register_impl("choosy", supports_args=lambda x: x.shape[0] == 999)
def choosy(x):
    return native(x)
"""


def recorded(*tokens: int) -> Trace:
    with record_calls() as recorder:
        for count in tokens:
            ir.ops.silu_and_mul(torch.randn(count, 16))
    return recorder.trace


def test_crashing_hanging_and_wrong_kernels_are_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_kernels.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # This process knows the names of the providers only.
    impls = ("segfaults", "hangs", "wrong", "choosy")
    known = [*ir.ops.silu_and_mul.supported_providers(), *impls]
    monkeypatch.setattr(ir.IrOp, "supported_providers", lambda op: known)
    path = tmp_path / "tuning.json"
    tuned = tune(recorded(3), path, Task(("bad_kernels",), QUICK), machine=HERE, timeout=10)
    assert tuned.problems == {}
    [cell] = tuned.cells
    found = {m.provider: (m.status, m.reason) for m in cell.results}
    assert found["segfaults"] == ("crashed", "ended with SIGSEGV while verifying")
    assert found["hangs"] == ("crashed", "did not respond within 10 s while verifying")
    assert found["wrong"][0] == "failed"
    assert found["choosy"][0] == "rejected"
    for provider in ("native", "opweave_c", "batch_invariant"):
        assert found[provider] == ("passed", "")
        assert cell.time(provider) is not None
    assert cell.best in ("native", "opweave_c", "batch_invariant")
    assert cell.default == "opweave_c"
    assert TuningFile.load(path).machines[HERE][cell.key].default == "opweave_c"


def test_a_run_continues_where_the_budget_ended(tmp_path: Path) -> None:
    path, trace, task = tmp_path / "tuning.json", recorded(1, 4, 16), Task(effort=QUICK)
    seconds = iter([0.0, 1.0, 3.0])
    first = tune(trace, path, task, machine=HERE, budget=2, clock=lambda: next(seconds))
    assert (len(first.cells), first.left) == (1, 2)
    steps: list[tuple[int, int, str]] = []
    second = tune(trace, path, task, machine=HERE, progress=lambda *step: steps.append(step))
    assert (len(second.cells), second.left) == (2, 0)
    assert steps == [(0, 2, "silu_and_mul"), (1, 2, "silu_and_mul")]
    assert {cell.tokens for cell in first.cells + second.cells} == {1, 4, 16}
    assert tune(trace, path, task, machine=HERE).cells == []
    assert len(TuningFile.load(path).machines[HERE]) == 3


def test_a_run_keeps_what_another_writes_meanwhile(tmp_path: Path) -> None:
    path, task = tmp_path / "tuning.json", Task(effort=QUICK)

    def other(done: int, total: int, op: str) -> None:
        tune(recorded(64), path, task, machine=HERE)

    tune(recorded(1), path, task, machine=HERE, progress=other)
    assert {tokens for _, _, tokens in TuningFile.load(path).machines[HERE]} == {1, 64}


def test_calls_that_native_refuses_are_reported(tmp_path: Path) -> None:
    trace = recorded(2)
    trace.calls[0].arguments["x"].update(shape=[2, 15], stride=[15, 1])  # an odd width
    tuned = tune(trace, tmp_path / "tuning.json", Task(effort=QUICK), machine=HERE)
    assert tuned.cells == []
    [reason] = tuned.problems.values()
    assert "native raises" in reason
    assert not (tmp_path / "tuning.json").exists()


def test_the_default_of_the_worker_is_that_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPWEAVE_IR_OP_PRIORITY__SILU_AND_MUL", "native")
    tuned = tune(recorded(2), tmp_path / "tuning.json", Task(effort=QUICK), machine=HERE)
    assert [cell.default for cell in tuned.cells] == ["native"]


# Timing with an estimate of its noise.


def test_the_median_and_its_noise() -> None:
    calls = {"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.004)}
    found = compare(calls, Effort(rounds=5, seconds=0.001))
    assert found["short"].microseconds == pytest.approx(1000, rel=0.9)
    assert found["long"].noise >= 0
    assert found["short"].microseconds < found["long"].microseconds


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    compare({"a": lambda: None, "b": lambda: None}, Effort(rounds=4, seconds=0), turns.append)
    pairs = [tuple(sorted(turns[i : i + 2])) for i in range(0, len(turns), 2)]
    assert pairs == [("a", "b")] * 5  # the first to find out how often to repeat


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([10, 10, 10], [11, 11, 11], 1 / 8),
        ([10, 10, 99], [11, 11, 11], 4 / 8),  # by how much a round is lost does not matter
        ([10, 10, 10], [10.1, 10.1, 10.1], 1),  # below the least difference
        ([10, 10, 10], [9, 9, 9], 1),
        ([10] * 15, [11] * 15, 2**-15),
    ],
)
def test_the_chance_of_winning_so_many_rounds(
    one: list[float], other: list[float], expected: float
) -> None:
    assert chance(one, other) == expected


def test_a_process_that_gets_half_a_core_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.perf_counter
    monkeypatch.setattr("time.thread_time", lambda: clock() / 2)
    assert disturbance() == "this machine is busy (a process gets 50% of a core)"
    monkeypatch.setattr("time.thread_time", clock)
    assert disturbance() is None
