"""The queue of jobs for a GPU: what is due, in which order, and what becomes of jobs that fail."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.processes import is_alive

# Last: tests/runs/gpu.py is not benchmarks/gpu.py, nor benchmarks/engine.py the tests' engine.
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "runs")]

from gpu_queue import pool, report, sources, state
from gpu_queue.gate import Gate
from gpu_queue.job import Job, Stage
from gpu_queue.jobs import all_jobs
from gpu_queue.plan import Planned, plan
from gpu_queue.process import WorkerProcess
from gpu_queue.results import Results
from gpu_queue.state import Record, StateError

FAKES = (Stage("first", share=0.25, repeats_first=True), Stage("second"), Stage("third"))


def job(name: str, stage: str = "first", body: str = "succeeds", **more: Any) -> Job:
    values = {"limit": 60, "expected": 1, "is_fresh": False, **more}
    return Job(name, stage, f"gpu_fake_jobs:{body}", **values)


def record(status: str, of: Job, **more: Any) -> Record:
    return Record(status, sources.digest_of(of), 9.0, "2026-11-27", "a GPU", "2.11.0", **more)


def test_what_is_due_comes_in_the_order_of_stages(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("before")
    new, passed, failed, stopped, changed_first, changed_third, _ = jobs = [
        job("new", "third"),
        job("passed", "second"),
        job("failed", "first"),
        job("stopped", "second"),
        job("changed_first", "first", sources=(source,)),
        job("changed_third", "third", sources=(source,)),
        job("newest", "third"),
    ]
    records = {
        "passed": record("passed", passed),
        "failed": record("crashed", failed),
        "stopped": record("stopped", stopped),
        "changed_first": replace(record("passed", changed_first), digest="another"),
        "changed_third": replace(record("passed", changed_third), digest="another"),
        "gone": record("passed", new),
    }
    found = plan(jobs, FAKES, records)
    assert [(each.job.name, each.state) for each in found] == [
        ("changed_first", "changed"),
        ("stopped", "due"),
        ("new", "due"),
        ("newest", "due"),
        ("changed_third", "changed"),
        ("failed", "retry"),
        ("passed", "done"),
    ]
    assert found[0].why == "sources changed; passed (a GPU, torch 2.11.0, 2026-11-27)"
    assert [each.expected for each in found] == [9.0, 1, 1, 1, 9.0, 1, 9.0]
    again = plan(jobs, FAKES, records, again=True)
    assert {each.state for each in again} == {"due"}


def test_a_digest_follows_sources_and_arguments(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    digests = set()
    for text in ("before", "after"):
        source.write_text(text)
        sources._file_digest.cache_clear()
        digests.add(sources.digest_of(job("one", sources=(source,))))
    digests.add(sources.digest_of(job("one", sources=lambda: (source,), arguments={"value": 2})))
    assert len(digests) == 3
    assert sources.digest_of(job("other")) == sources.digest_of(job("one"))


def test_sources_of_an_implementation_are_what_it_imports() -> None:
    jobs = {each.name: each for each in all_jobs()}

    def names(name: str) -> set[str]:
        found = jobs[name].sources
        assert callable(found)
        return {path.relative_to(ROOT).as_posix() for path in found()}

    triton = names("conformance/paged_attention:triton")
    folder = "packages/opweave/src/opweave/kernels/triton"
    assert {f"{folder}/attention.py", f"{folder}/jit/paged_attention.py"} <= triton
    assert f"{folder}/launch.py" in triton
    assert "packages/opweave/src/opweave/ir/ops/paged_attention.py" in triton
    assert not triton & {f"{folder}/rows.py", f"{folder}/jit/norm.py"}
    norm = names("conformance/rms_norm:triton")
    assert f"{folder}/jit/norm.py" in norm
    assert f"{folder}/jit/paged_attention.py" not in norm


def planned(*jobs: Job) -> list[Planned]:
    return plan(jobs, FAKES, {})


def test_jobs_that_end_in_every_way(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    bodies = {
        "succeeds": "passed", "fails": "failed", "crashes": "crashed", "leaves": "crashed",
        "hangs": "timeout", "prints_garbage": "failed", "finds_a_problem": "failed",
    }  # fmt: skip
    jobs = [
        job(
            body,
            body=body,
            limit=2 if body == "hangs" else 60,
            arguments={"pid_file": str(pid_file)} if body == "hangs" else {},
        )
        for body in bodies
    ]
    last = job("last", "third", arguments={"value": 11})
    results = Results(tmp_path / "state.json", tmp_path / "out", time.monotonic(), quiet=True)
    run(planned(*jobs, last), results, budget=200, lanes=2)
    found = state.load(tmp_path / "state.json")
    assert {name: each.status for name, each in found.items()} == {**bodies, "last": "passed"}
    problems = {name: each.problem for name, each in found.items()}
    assert problems["fails"].startswith("ValueError: no such shape\n")
    assert "about to fail" in problems["fails"]
    assert problems["crashes"].startswith("ended by SIGSEGV, at the call with a bad address\n")
    assert "string_at" in problems["crashes"]
    assert problems["leaves"].startswith("ended with exit code 3")
    assert problems["hangs"].splitlines() == ["did not end within its time limit", "waiting"]
    assert "'not a row'" in problems["prints_garbage"]
    assert problems["finds_a_problem"].startswith("output 0 differs")
    assert [row["value"] for row in found["crashes"].rows] == [6]  # found before the crash
    assert not is_alive(int(pid_file.read_text()))  # ended with the job
    assert json.loads((tmp_path / "out" / "gpu_queue.json").read_text()) == json.loads(
        (tmp_path / "state.json").read_text()
    )
    assert "no such shape" in (tmp_path / "out" / "gpu_queue.log").read_text()
    assert "| crashes | crashed |" in (tmp_path / "state.md").read_text()
    # The next run goes on from there: only what failed is left.
    resumed = plan([*jobs, last], FAKES, found)
    assert {each.job.name for each in resumed if each.state == "done"} == {"succeeds", "last"}


def run(
    jobs: list[Planned],
    results: Results,
    *,
    budget: float,
    lanes: int,
    began: float | None = None,
) -> None:
    began = time.monotonic() if began is None else began
    pool.run(
        pool.Queue(jobs, FAKES, began, budget),
        lambda gate: WorkerProcess("cpu", began + budget, gate, modules=()),
        results.add,
        deadline=began + budget,
        lanes=lanes,
    )


def test_the_end_of_the_budget_stops_a_job_that_stays_due(tmp_path: Path) -> None:
    jobs = [
        job("short", "first", "waits", arguments={"seconds": 0.1}),
        job("too_long", "second", expected=100),
        job("endless", "third", "waits", arguments={"seconds": 600}),
        job("never", "third"),
    ]
    results = Results(tmp_path / "state.json", None, time.monotonic(), quiet=True)
    began = time.monotonic()
    run(planned(*jobs), results, budget=6, lanes=1)
    assert time.monotonic() - began < 12
    statuses = {name: each.status for name, each in results.records.items()}
    assert statuses == {"short": "passed", "endless": "stopped"}
    found = plan(jobs, FAKES, state.load(tmp_path / "state.json"))
    assert [(each.job.name, each.state) for each in found] == [
        ("too_long", "due"),
        ("endless", "due"),
        ("never", "due"),
        ("short", "done"),
    ]


def test_measuring_jobs_have_the_device_alone(tmp_path: Path) -> None:
    file = tmp_path / "log"
    jobs = [
        job(f"{n}", body="measures", arguments={"file": str(file)}, is_fresh=True) for n in range(3)
    ]
    results = Results(tmp_path / "state.json", None, time.monotonic(), quiet=True)
    run(planned(*jobs), results, budget=100, lanes=3)
    assert {each.status for each in results.records.values()} == {"passed"}
    lines = file.read_text().split()
    assert len(lines) == 9
    assert all(len(set(lines[i : i + 3])) == 1 for i in (0, 3, 6))
    assert len(set(lines)) == 3


def test_a_job_that_measures_waits_for_those_that_prepare() -> None:
    gate = Gate()
    assert gate.share(0)
    assert gate.share(0)
    assert not gate.hold(0.01)  # the other one still prepares
    gate.leave()
    assert gate.hold(0)
    assert not gate.share(0.01)
    gate.release()
    assert gate.share(0)


def test_a_stage_that_has_had_its_share_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pool.time, "monotonic", lambda: now)
    jobs = [*(job(f"first {n}") for n in range(4)), job("second", "second"), job("third", "third")]
    queue = pool.Queue(planned(*jobs), FAKES, 0.0, 100.0)
    taken = []
    while (each := queue.take()) is not None:
        taken.append(each.job.name)
        now += 13  # a quarter of 100 is over after two of them
    assert taken == ["first 0", "first 1", "second", "third", "first 2", "first 3"]
    assert pool.Queue(planned(job("long", expected=2)), FAKES, now - 99, 100.0).take() is None


def test_rows_of_a_failed_run_are_added_to_older_ones() -> None:
    def row(case: str, value: float) -> dict[str, Any]:
        return {"name": "decode", "case": case, "contender": "opweave", "value": value}

    old = Record("passed", "x", 1.0, "2026-11-26", rows=[row("1", 10), row("8", 80)])
    new = Record("crashed", "y", 1.0, "2026-11-27", rows=[row("1", 11)], problem="SIGSEGV")
    found = state.merged(old, new)
    assert [r["value"] for r in found.rows] == [80, 11]
    assert (found.status, found.digest) == ("crashed", "y")
    assert state.merged(old, replace(new, status="passed")).rows == [row("1", 11)]
    assert state.merged(None, new) == new


def test_a_row_of_ours_is_compared_with_the_best_other_on_the_same_machine() -> None:
    def measured(contender: str, value: float, unit: str, machine: str = "H200") -> Record:
        row = {"name": "decode", "case": "1", "contender": contender, "value": value, "unit": unit}
        return Record("passed", "x", 1.0, "2026-11-27", machine, "2.11.0", rows=[row])

    speeds = {
        "a": measured("opweave", 300, "tokens/s"),
        "b": measured("transformers", 100, "tokens/s"),
        "c": measured("transformers-compiled", 200, "tokens/s"),
        "d": measured("transformers-compiled", 900, "tokens/s", "H100"),
    }
    [ours] = [row for row in report.rows_of(speeds) if row["contender"] == "opweave"]
    assert (ours["baseline"], ours["against"], ours["ratio"]) == (200, "transformers-compiled", 1.5)
    assert report.cells(ours)[-1] == "1.5 x transformers-compiled"
    times = {"a": measured("triton", 30, "us"), "b": measured("sdpa", 15, "us")}
    [ours] = [row for row in report.rows_of(times) if row["contender"] == "triton"]
    assert ours["ratio"] == 0.5


@pytest.mark.parametrize("text", ["", "[]", '{"jobs": {"a": {"surprise": 2}}}', "\x00"])
def test_a_damaged_state_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"state\.json does not hold"):
        state.load(path)
