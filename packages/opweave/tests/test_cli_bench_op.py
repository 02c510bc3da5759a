"""``opweave bench OP``."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import test_cli
from opweave import ir
from opweave.tuning import record_calls
from test_cli import Run, assert_one_line_error, run_anew

run = test_cli.run  # the fixture
SMALL = ("--shape", "hidden_size=32", "--rounds", "2")


@pytest.fixture(autouse=True)
def quick_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opweave.tuning.timing._COPY_BYTES", 2**20)


def test_table(run: Run) -> None:
    done = run("bench", "rms-norm", "--tokens", "1", "3", *SMALL)
    assert done.returncode == 0, done.stderr
    header, *rows = (line.split() for line in done.stdout.splitlines())
    assert header == ["tokens", "provider", "µs", "GB/s", "of", "limit", "error", "call"]
    assert len(rows) == 2 * len(ir.ops.rms_norm.impls)
    assert sum("(default)" in row for row in rows) == 2
    default = next(row for row in rows if "(default)" in row)
    assert default[:2] == ["1", "opweave_c"]
    assert "rms_norm(bfloat16[1," in done.stdout


def test_json(run: Run) -> None:
    done = run("bench", "silu_and_mul", "--tokens", "4", *SMALL, "--dtype", "float32", "--json")
    found = json.loads(done.stdout)
    assert found["op"] == "silu_and_mul"
    assert found["copy_gb_per_second"] > 0
    native = next(row for row in found["rows"] if row["provider"] == "native")
    assert native["bytes"] == 4 * 4 * (64 + 32)
    assert native["gb_per_second"] == pytest.approx(
        native["bytes"] / native["time"]["microseconds"] / 1e3
    )
    assert native["limit_share"] == pytest.approx(
        native["gb_per_second"] / found["copy_gb_per_second"]
    )
    assert {row["status"] for row in found["rows"]} <= {"passed", "rejected"}


def test_plot(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chart.svg"
    assert run("bench", "rms_norm", *SMALL, "--plot", file).returncode == 0
    svg = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) >= 4
    assert all(len(line.attrib["points"].split()) == 3 for line in lines)


def test_calls_of_a_trace(run: Run, tmp_path: Path) -> None:
    with record_calls() as recorder:
        ir.ops.rms_norm(torch.randn(7, 16), torch.ones(16), 1e-6)
    recorder.trace.save(tmp_path / "t.jsonl")
    done = run("bench", "rms_norm", "--trace", tmp_path / "t.jsonl", "--rounds", "2", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert {row["tokens"] for row in rows} == {7}
    assert all("float32[7, 16]" in row["call"] for row in rows)


WRONG_KERNEL = """
from opweave import ir

@ir.ops.silu_and_mul.register_impl("mine")
def silu_and_mul(x):
    return ir.ops.silu_and_mul.native(x) * 1.5
"""


def test_a_wrong_kernel_is_not_timed(tmp_path: Path) -> None:
    (tmp_path / "my_kernel.py").write_text(WRONG_KERNEL, encoding="utf-8")
    arguments = ("--tokens", "2", "--import", "my_kernel", "--json")
    done = run_anew("bench", "silu_and_mul", *SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    mine = next(r for r in json.loads(done.stdout)["rows"] if r["provider"] == "mine")
    assert (mine["status"], mine["time"]) == ("failed", None)


def test_bad_input(run: Run, tmp_path: Path) -> None:
    assert_one_line_error(run("bench", "rms_nrom"), "Did you mean 'rms_norm'?")
    assert_one_line_error(run("bench", "rms_norm", "--tokens", "0"), "--tokens 0")
    assert_one_line_error(run("bench", "rms_norm", "--dtype", "int8"), "--dtype 'int8'")
    assert_one_line_error(run("bench", "rms_norm", "--shape", "hidden=1"), "--shape 'hidden=1'")
    assert_one_line_error(run("bench", "rms_norm", "--shape", "hidden_size=a"), "a number")
    assert_one_line_error(run("bench", "rms_norm", "--plot", "chart.png"), ".svg")
    assert_one_line_error(run("bench", "rms_norm", "--trace", tmp_path / "no"), "cannot read")
    assert_one_line_error(run("bench", "rms_norm", "--seed", str(2**64)), "for --seed")
    both = ("--trace", tmp_path / "no", "--tokens", "1")
    assert_one_line_error(run("bench", "rms_norm", *both), "Leave out --tokens")
    assert_one_line_error(run("bench"), "OP")
