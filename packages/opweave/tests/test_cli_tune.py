"""``opweave tune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import test_cli
from opweave import ir
from opweave.tuning import Cell, Machine, Measurement, Time, TuningFile, record_calls
from opweave.tuning.measure import digest_of
from test_cli import CHECKPOINT, Run, assert_one_line_error, run_anew

run = test_cli.run  # the fixture


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("busy", "disturbance"):
        monkeypatch.setattr(f"opweave.tuning.tuning_file.{name}", lambda: None)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    with record_calls() as recorder:
        for tokens in (1, 8):
            ir.ops.silu_and_mul(torch.randn(tokens, 16))
    recorder.trace.save(tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


def test_a_trace_is_tuned(run: Run, trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "tuning.json"
    done = run("tune", trace, "-o", output, "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert "2 measured" in done.stdout
    cells = TuningFile.load(output).here(output)
    assert {tokens for _, _, tokens in cells} == {1, 8}
    assert "0 measured" in run("tune", trace, "-o", output).stdout
    digest = digest_of(ir.ops.silu_and_mul.impls["native"])
    text = output.read_text(encoding="utf-8").replace(digest, "0" * 32)
    output.write_text(text, encoding="utf-8")
    again = run("tune", trace, "-o", output, "--rounds", "2").stdout
    assert "changed since they were measured: silu_and_mul:native" in again
    assert "2 measured" in again


def test_nothing_is_chosen_on_a_busy_machine(
    run: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "this machine is busy (load 12 on 2 cores)"
    monkeypatch.setattr("opweave.tuning.tuning_file.busy", lambda: reason)
    output = tmp_path / "tuning.json"
    shown = run("tune", trace, "-o", output, "--rounds", "2").stdout
    assert f"{reason}: nothing is chosen in 1. Run the command again when it is idle." in shown
    monkeypatch.setattr("opweave.tuning.tuning_file.busy", lambda: None)
    again = run("tune", trace, "-o", output, "--rounds", "2").stdout
    assert "1 measured" in again
    assert "busy" not in again


def test_a_dry_run_of_a_model_measures_nothing(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "tuning.json"
    done = run("tune", CHECKPOINT, "-o", output, "--tokens", "4", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {each["op"] for each in found} >= {"linear", "rms_norm", "silu_and_mul"}
    assert {each["tokens"] for each in found} == {1, 4}
    assert not output.exists()
    done = run("tune", CHECKPOINT, "-o", output, "--tokens", "4", "--dry-run")
    assert done.stdout.splitlines()[-1] == f"{len(found)} to measure, 0 in {output}"


def test_files_are_merged(run: Run, tmp_path: Path) -> None:
    machine = Machine("cpu", "a processor", "amx", 2, "2.13", "0.1")
    for name, tokens in (("a", 1), ("b", 8)):
        file = TuningFile()
        results = (Measurement("native", "passed", time=Time(1, 0)),)
        file.add(Cell("rms_norm", "x", tokens, 1, "native", results), machine)
        file.save(tmp_path / name)
    done = run("tune", "--merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert "2 measurements of 1 machines" in done.stdout
    assert len(TuningFile.load(tmp_path / "c").machines[machine]) == 2


def test_bad_input(run: Run, trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "tuning.json"
    assert_one_line_error(run("tune", "-o", output), "Give a model directory or a trace")
    assert_one_line_error(run("tune", trace), "--output")
    assert_one_line_error(run("tune", tmp_path / "no.jsonl", "-o", output), "cannot read")
    assert_one_line_error(run("tune", trace, "-o", output, "--budget", "0"), "--budget 0")
    assert_one_line_error(run("tune", trace, "-o", output, "--tokens", "4"), "is for a model")
    assert_one_line_error(run("tune", trace, "-o", output, "--seed", str(-(2**64))), "for --seed")
    assert_one_line_error(run("tune", trace, "-o", output, "--merge", output), "Leave out")
    assert_one_line_error(run("tune", "-o", output, "--merge", trace), "cannot read")
    output.write_text("{}", encoding="utf-8")
    assert_one_line_error(run("tune", trace, "-o", output), "is not a tuning file")


def measured(provider: str, microseconds: float) -> Measurement:
    digest = digest_of(ir.ops.silu_and_mul.impls[provider])
    return Measurement(provider, "passed", time=Time(microseconds, 0), chance=0, digest=digest)


def faster_native(path: Path, machine: Machine | None = None) -> Path:
    """Write a file in which native is the fastest implementation of silu_and_mul."""
    results = (measured("opweave_c", 55), measured("native", 41))
    file = TuningFile()
    file.add(Cell("silu_and_mul", "x", 1, 1, "opweave_c", results), machine or Machine.here())
    file.save(path)
    return path


def test_explain_shows_the_tuned_choice(run: Run, tmp_path: Path) -> None:
    path = faster_native(tmp_path / "tuning.json")
    try:
        done = run("explain", CHECKPOINT, "--tuning-file", path, "--prompt", "def")
    finally:
        ir.current_registry().settings.set_tuned({})
    assert done.returncode == 0, done.stderr
    line = next(each for each in done.stdout.splitlines() if each.startswith("silu_and_mul"))
    assert line.split()[1] == "native"
    assert f"tuned: 41 µs against 55 µs, {path}" in line


def test_ops_lists_the_ranges(run: Run, tmp_path: Path) -> None:
    path, file = tmp_path / "tuning.json", TuningFile()
    for tokens, native in ((1, 41), (64, 99)):
        results = (measured("opweave_c", 55), measured("native", native))
        file.add(Cell("silu_and_mul", "x", tokens, 1, "opweave_c", results), Machine.here())
    file.save(path)
    try:
        shown = run("ops", "silu-and-mul", "--tuning-file", path).stdout
        found = json.loads(run("ops", "silu-and-mul", "--json").stdout)[0]
    finally:
        ir.current_registry().settings.set_tuned({})
    assert f"0 to 1 tokens: native first (tuned: 41 µs against 55 µs, {path})" in shown
    assert "2 tokens or more: opweave_c first (platform default, cpu)" in shown
    assert [each["max_tokens"] for each in found["tuned"]] == [1, None]
    assert [each["priority"][0]["provider"] for each in found["tuned"]] == ["native", "opweave_c"]


def test_a_file_of_another_machine_is_ignored(tmp_path: Path) -> None:
    path = faster_native(tmp_path / "t.json", Machine("cpu", "other", "amx", 2, "2.13", "0.1"))
    done = run_anew("explain", CHECKPOINT, "--prompt", "def", OPWEAVE_TUNING_FILE=str(path))
    assert done.returncode == 0
    assert "SettingWarning: OPWEAVE_TUNING_FILE is ignored: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert "tuned: " not in done.stdout


def test_a_missing_file_is_an_error(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    done = run_anew("ops", OPWEAVE_TUNING_FILE=str(missing))
    assert_one_line_error(done, "OPWEAVE_TUNING_FILE", str(missing))
    assert_one_line_error(run("ops", "--tuning-file", missing), "--tuning-file", str(missing))
