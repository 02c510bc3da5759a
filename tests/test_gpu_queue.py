"""The queue of jobs for a GPU: what is due, in which order, and what becomes of jobs that fail."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

import opweave.compile
from conftest import ROOT

PROGRAM = ROOT / "tests" / "runs" / "gpu.py"
# At the end: tests/runs/gpu.py is not benchmarks/gpu.py, nor benchmarks/engine.py tests/engine.
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "runs")]

from gpu_queue import metadata, pool, report, sources, state  # noqa: E402
from gpu_queue.bodies import conformance, generation, greedy, kernels, models, smoke  # noqa: E402
from gpu_queue.gate import Gate  # noqa: E402
from gpu_queue.job import Job, Stage  # noqa: E402
from gpu_queue.jobs import POINTWISE, STAGES, all_jobs, select  # noqa: E402
from gpu_queue.plan import Planned, plan  # noqa: E402
from gpu_queue.process import WorkerProcess  # noqa: E402
from gpu_queue.results import Results  # noqa: E402
from gpu_queue.state import Record, StateError  # noqa: E402

FAKES = (Stage("first", share=0.25, repeats_first=True), Stage("second"), Stage("third"))


def job(name: str, stage: str = "first", body: str = "succeeds", **more: Any) -> Job:
    values = {"limit": 60, "expected": 1, "is_fresh": False, **more}
    return Job(name, stage, f"gpu_fake_jobs:{body}", **values)


def record(status: str, of: Job, **more: Any) -> Record:
    return Record(status, sources.digest_of(of), 9.0, "2026-11-27", "a GPU", "2.11.0", **more)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The main function of tests/runs/gpu.py."""
    spec = spec_from_file_location("gpu_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    main: Callable[..., int] = module.main
    return main


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
    folder = "src/opweave/kernels/triton"
    assert {f"{folder}/paged_attention.py", f"{folder}/jit/paged_attention.py"} <= triton
    assert f"{folder}/registration.py" in triton
    assert "src/opweave/ir/ops/paged_attention.py" in triton
    assert not triton & {f"{folder}/norm.py", f"{folder}/jit/norm.py"}
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
            limit=1 if body == "hangs" else 60,
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
    assert found["last"].torch == torch.__version__
    assert found["last"].machine
    assert not Path(f"/proc/{pid_file.read_text()}").exists()  # ended with the job
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
        lambda gate: WorkerProcess("cpu", began + budget, gate),
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
    run(planned(*jobs), results, budget=15, lanes=1)
    assert time.monotonic() - began < 25
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


def test_bodies_take_the_arguments_of_their_jobs() -> None:
    stages = [stage.name for stage in STAGES]
    for device, size in (("cuda", "full"), ("cpu", "tiny")):
        jobs = all_jobs(device, size)
        assert len({each.name for each in jobs}) == len(jobs)
        for each in jobs:
            assert each.stage in stages
            assert each.name.startswith(f"{each.stage}/")
            assert 0 < each.expected <= each.limit
            module, _, function = each.body.partition(":")
            inspect.signature(getattr(import_module(module), function)).bind(**each.arguments)
            json.dumps(each.arguments)
    assert {each.stage for each in jobs} == set(stages)
    assert {each.arguments["op"] for each in jobs if each.stage == "smoke"} >= set(POINTWISE)


def test_jobs_by_name() -> None:
    jobs = all_jobs()
    found, unknown = select(jobs, ["decode/64", "smoke/rms_norm", "host", "decoed"])
    assert unknown == ["decoed"]
    names = [each.name for each in found]
    assert "decode/64/opweave" in names
    assert "smoke/rms_norm:triton" in names
    assert "smoke/rms_norm_gated:native" not in names
    assert "host/pointwise" in names


def test_the_program_without_a_gpu(
    program: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("started CUDA"))
    monkeypatch.chdir(tmp_path)
    state_file = str(tmp_path / "state.json")
    assert program(["--dry-run", "--json", "--state", state_file]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert jobs[0]["name"].startswith("smoke/")
    assert {each["state"] for each in jobs} == {"due"}
    assert program(["--dry-run", "--only", "decode/1/opweave", "--state", state_file]) == 0
    assert "never run" in capsys.readouterr().out
    assert program(["--list", "--only", "decode/1/opweave"]) == 0
    assert capsys.readouterr().out == "decode/1/opweave\n"
    (tmp_path / "file").touch()
    for arguments, expected in (
        (["--state", state_file], "finds no GPU"),
        (["--only", "decode/46"], "Did you mean 'decode/64"),
        (["--only", "smok"], "Did you mean 'smoke'"),
        (["--budget", "-1"], "must be above zero"),
        (["--out", str(tmp_path / "file")], "is not a folder"),
        (["--state", str(tmp_path / "file")], "does not hold"),
    ):
        with pytest.raises(SystemExit) as stopped:
            program(arguments)
        assert stopped.value.code == 2
        told = capsys.readouterr().err
        assert expected in told
        assert told.count("\n") == 1
    assert not (tmp_path / "state.json").exists()


def test_the_program_runs_jobs_from_any_folder(tmp_path: Path) -> None:
    command = [
        sys.executable, PROGRAM, "--device", "cpu", "--size", "tiny", "--budget", "120",
        "--only", "smoke/silu_and_mul", "--state", tmp_path / "state.json",
        "--out", tmp_path / "out", "--lanes", "1",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 not applicable" in done.stdout  # Triton, on the CPU
    assert "smoke/silu_and_mul:native" in done.stderr
    assert "0 are left for the next run" in done.stdout
    found = state.load(tmp_path / "out" / "gpu_queue.json")
    assert found["smoke/silu_and_mul:native"].status == "passed"


def test_a_killed_run_keeps_what_it_found(tmp_path: Path) -> None:
    file, out = tmp_path / "state.json", tmp_path / "out"
    command = [
        sys.executable, PROGRAM, "--device", "cpu", "--only", "smoke", "--lanes", "1",
        "--state", file, "--out", out,
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = [process.stderr.readline() for _ in range(3)]
        workers = children_of(process.pid)
        process.kill()
    assert all("passed" in line for line in told)
    assert len(state.load(out / "gpu_queue.json")) >= 3
    found = state.load(file)
    assert len(found) >= 3
    assert workers
    for _ in range(100):
        if not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"{workers} still run")
    left = [each for each in plan(all_jobs("cpu"), STAGES, found) if each.state != "done"]
    assert left[0].job.name.startswith("smoke/")


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def test_make_prints_the_queue() -> None:
    command = ["make", "gpu", "--dry-run", f"VENV={sys.prefix}", "GPU_OPTIONS=--only host"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "host/pointwise" in done.stdout


def test_opweave_looks_installed_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metadata.folders(tmp_path) == ()

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    [folder] = metadata.folders(tmp_path)
    [found] = distributions(path=[folder])
    assert (found.name, found.version) == ("opweave", opweave.__version__)
    [point] = found.entry_points.select(group="torch_dynamo_backends")
    assert point.load() is opweave.compile.backend


def rows(found: Any) -> list[dict[str, Any]]:
    listed = list(found)
    assert listed
    assert all({"name", "case"} <= row.keys() for row in listed)
    json.dumps(listed)
    return listed


def test_smoke_finds_what_is_right_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("rms_norm", "fused_add_rms_norm", "reshape_and_cache"):
        [row] = rows(smoke.run(op, "native", "cpu"))
        assert row["value"] > 0
        assert "problem" not in row
    [row] = rows(smoke.run("rms_norm", "triton", "cpu"))
    assert row["value"] == 0
    assert row["note"]
    subject_type = type(smoke.subject_of("relu2", "native", "cpu"))
    monkeypatch.setattr(subject_type, "run", lambda self, values: values[0] + 1)
    [row] = rows(smoke.run("relu2", "native", "cpu"))
    assert row["problem"].startswith("output 0: ")


def test_conformance_yields_cases_and_problems() -> None:
    [row] = rows(conformance.run("silu_and_mul", "row_by_row", "cpu", checks=("values",)))
    assert row["value"] > 10
    assert row["name"] == "conformance"


def test_decoding_and_prompts_on_the_cpu() -> None:
    for contender in ("opweave", "transformers"):
        [row] = rows(generation.decode(contender, 2, "cpu", "tiny", tokens=4))
        assert row["contender"] == contender
        assert row["value"] > 0
        assert row["limit_share"] > 0
    [row] = rows(generation.prefill("opweave", 32, "cpu", "tiny"))
    assert row["value"] > 0


def test_transformers_decodes_the_same_with_a_static_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DTYPE", torch.float32)  # no ties
    path = generation.write_config(tmp_path / "model", models.config_of("tiny"))
    answers = []
    for more in ({"compiled": False}, {"compiled": True, "backend": "aot_eager"}):
        torch.manual_seed(1)
        model = models.Transformers(path, 2, 7, 5, device="cpu", **more)
        for _ in range(2):  # the second time, the cache is used again
            random.seed(2)
            assert len(model.steps()) == 5
            answers.append(model.answers)
    assert [len(answer) for answer in answers[0]] == [5, 5]
    assert answers[1:] == answers[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("contender", ["opweave-compiled", "transformers-compiled"])
def test_compiled_contenders_on_the_cpu(contender: str) -> None:
    [row] = rows(generation.decode(contender, 2, "cpu", "tiny", tokens=4))
    assert row["value"] > 0


def test_kernels_on_the_cpu() -> None:
    small: dict[str, Any] = {"device": "cpu", "provider": "native", "hidden": 256}
    more = {"backend": "eager", "copied": 2**16}
    for op, shapes in (("silu_and_mul", [(4, 0)]), ("paged_attention", [(2, 64)])):
        found = rows(kernels.cells(op, shapes, **small, **more))
        assert {"native", "eager", "inductor"} <= {row["contender"] for row in found}
    found = rows(kernels.host(POINTWISE[:2], **small))
    assert [row["contender"] for row in found] == ["native", "eager"] * 2
    found = rows(kernels.prompt_attention(64, **small))
    assert [row["contender"] for row in found] == ["native", "opweave", "sdpa", "gather and sdpa"]


def test_greedy_answers_on_the_cpu(tmp_path: Path) -> None:
    [row] = rows(greedy.run("llama", 0, "cpu"))
    assert (row["value"], row["unit"]) == (3, "of 3 answers equal")
    assert "problem" not in row
    for family in greedy.FAMILIES:
        greedy.write_checkpoint(tmp_path / family, family)
        found = greedy.answers(tmp_path / family, 0)
        assert [len(answer) for answer in found] == [32, 32, 32]
        assert len({*found[0], *found[1], *found[2]}) > 5
