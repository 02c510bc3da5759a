"""Tuning in a subprocess: crashes are excluded, and a run continues where the last one ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opweave import ir
from opweave.tuning import Effort, Machine, Task, Trace, TuningFile, record_calls, tune

QUICK = Effort(rounds=2, seconds=1e-5)
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
