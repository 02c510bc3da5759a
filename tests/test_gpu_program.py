"""The program that runs the queue of jobs for a GPU: ``make gpu``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import opweave.compile
from support import ROOT
from support.processes import is_alive, wait_until

PROGRAM = ROOT / "tests" / "runs" / "gpu.py"
# Last: tests/runs/gpu.py is not benchmarks/gpu.py, nor benchmarks/engine.py the tests' engine.
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "runs")]

from gpu_queue import metadata, state  # noqa: E402
from gpu_queue.jobs import STAGES, all_jobs  # noqa: E402
from gpu_queue.naming import select  # noqa: E402
from gpu_queue.plan import plan  # noqa: E402


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
    assert found["smoke/silu_and_mul:native"].torch == torch.__version__
    assert found["smoke/silu_and_mul:native"].machine


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
    wait_until(lambda: not any(map(is_alive, workers)))
    left = [each for each in plan(all_jobs("cpu"), STAGES, found) if each.state != "done"]
    assert left[0].job.name.startswith("smoke/")


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_jobs_that_cannot_start_end_the_run(
    program: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as stopped:
        program(["--only", "smoke", "--lanes", "1", "--state", str(tmp_path / "state.json")])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("gpu.py: the processes of jobs do not start: ended with exit code 1")
    assert "not cuda" in told
    assert not (tmp_path / "state.json").exists()


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
