"""``opweave tune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import test_cli
from opweave import ir
from opweave.tuning import Cell, Machine, Measurement, Time, TuningFile, record_calls
from test_cli import CHECKPOINT, Run, assert_one_line_error

run = test_cli.run  # the fixture


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
    assert_one_line_error(run("tune", trace, "-o", output, "--merge", output), "Leave out")
    assert_one_line_error(run("tune", "-o", output, "--merge", trace), "cannot read")
    output.write_text("{}", encoding="utf-8")
    assert_one_line_error(run("tune", trace, "-o", output), "is not a tuning file")
