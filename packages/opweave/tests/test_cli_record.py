"""``opweave record``, ``opweave replay`` and ``opweave bench OP``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import test_cli
from opweave import ir
from opweave.tuning import record_calls
from test_cli import CHECKPOINT, Run, assert_one_line_error, run_anew

run = test_cli.run  # the fixture


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    done = run_anew("record", CHECKPOINT, "-o", file, "--tokens", "3", "5", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "8 ops" in done.stdout
    return file


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_record_has_every_length_and_a_decode_step(trace: Path) -> None:
    header, *calls = lines(trace)
    assert header["format"] == "opweave trace"
    assert {call["tokens"] for call in calls if call["op"] == "rms_norm"} == {3, 5, 1}
    attention = next(c for c in calls if c["op"] == "paged_attention" and c["tokens"] == 3)
    assert attention["count"] == 6  # layers
    assert attention["arguments"]["seq_lens"]["values"] == [3]
    blocks, *_ = attention["arguments"]["key_cache"]["shape"]
    assert blocks <= 4  # a small cache, regardless of the memory of the machine


def test_replay_in_another_process(trace: Path) -> None:
    done = run_anew("replay", trace, "--json", "--op", "rms-norm", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["replays"]
    assert [(each["op"], each["status"]) for each in found] == [("rms_norm", "passed")] * 3
    assert all(each["time"]["microseconds"] > 0 for each in found)


def test_replay_prints_a_table(run: Run, trace: Path) -> None:
    done = run("replay", trace, "--provider", "native", "--op", "silu_and_mul", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split()[:4] == ["op", "tokens", "calls", "provider"]
    assert all(row.split()[3:5] == ["native", "passed"] for row in rows)
    assert len(rows) == 3


def test_replay_fails_where_the_provider_supports_nothing(run: Run, trace: Path) -> None:
    done = run("replay", trace, "--provider", "triton", "--op", "silu_and_mul", "--rounds", "2")
    assert done.returncode == 1
    assert "rejected: " in done.stdout


WRONG_KERNEL = """
from opweave import ir

@ir.ops.silu_and_mul.register_impl("mine")
def silu_and_mul(x):
    return ir.ops.silu_and_mul.native(x) * 1.5
"""


def test_replay_finds_a_wrong_kernel(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "my_kernel.py").write_text(WRONG_KERNEL, encoding="utf-8")
    done = run_anew(
        "replay", trace, "--provider", "mine", "--op", "silu_and_mul", "--import", "my_kernel",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "✗ silu_and_mul: output 0:" in done.stdout


def test_record_with_data(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    arguments = ("--prompt", "def", "--max-tokens", "1", "--data", "--dtype", "float32")
    assert run("record", CHECKPOINT, "-o", file, *arguments).returncode == 0
    header, *calls = lines(file)
    assert header["data"] == "t.safetensors"
    kinds = {a["type"] for call in calls for a in call["arguments"].values()}
    assert kinds == {"safetensors", "scalar"}
    assert run("replay", file, "--op", "fused_add_rms_norm", "--rounds", "2").returncode == 0


def test_bad_input(run: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    assert_one_line_error(run("record", CHECKPOINT, "-o", tmp_path / "no" / "t"), "no directory")
    assert_one_line_error(run("record", tmp_path, "-o", out), "tokenizer.json")
    assert_one_line_error(run("record", CHECKPOINT, "-o", out, "--tokens", "0"), "--tokens 0")
    assert_one_line_error(
        run("record", CHECKPOINT, "-o", out, "--tokens", "900"), "context of 256 tokens"
    )
    same = tmp_path / "t.safetensors"
    assert_one_line_error(run("record", CHECKPOINT, "-o", same, "--data"), "writes the tensors")
    assert_one_line_error(run("replay", trace, "--seed", str(2**64)), "for --seed")
    assert_one_line_error(run("replay", trace, "--rounds", "0"), "for --rounds")
    assert_one_line_error(run("replay", out), str(out))
    assert_one_line_error(run("replay", trace, "--op", "rms_nrom"), "Did you mean", "rms_norm")
    assert_one_line_error(run("replay", trace, "--provider", "x"), "'x'", "opweave_c")


# ``opweave bench OP``.

SMALL = ("--shape", "hidden_size=32", "--rounds", "2")


@pytest.fixture(autouse=True)
def _quick_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opweave.tuning.timing._COPY_BYTES", 2**20)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))


def test_bench_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("busy", "disturbance"):
        monkeypatch.setattr(f"opweave.tuning.timing.{name}", lambda: None)
    done = run("bench", "rms-norm", "--tokens", "1", "3", *SMALL)
    assert done.returncode == 0, done.stderr
    header, *rows = (line.split() for line in done.stdout.splitlines())
    assert " ".join(header) == "tokens provider µs call µs GB/s of limit error call"
    assert len(rows) == 2 * len(ir.ops.rms_norm.impls)
    assert sum("(default)" in row for row in rows) == 2
    default = next(row for row in rows if "(default)" in row)
    assert default[:2] == ["1", "opweave_c"]
    assert "rms_norm(bfloat16[1," in done.stdout


def test_bench_on_a_busy_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (12.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    reason = "this machine is busy (load 12 on 2 cores)"
    lines = run("bench", "silu_and_mul", "--tokens", "4", *SMALL).stdout.splitlines()
    providers = [line.split()[1] for line in lines[1:-1]]
    assert providers[0] == "native"
    assert set(providers) == set(ir.ops.silu_and_mul.impls)
    assert lines[-1] == f"{reason}: not ranked"
    found = json.loads(run("bench", "silu_and_mul", "--tokens", "4", *SMALL, "--json").stdout)
    assert found["busy"] == reason


def test_bench_json(run: Run) -> None:
    done = run("bench", "silu_and_mul", "--tokens", "4", *SMALL, "--dtype", "float32", "--json")
    found = json.loads(done.stdout)
    assert found["op"] == "silu_and_mul"
    assert found["copy_gb_per_second"] > 0
    native = next(row for row in found["rows"] if row["provider"] == "native")
    assert native["call_time"]["microseconds"] > 0
    assert native["bytes"] == 4 * 4 * (64 + 32)
    assert native["gb_per_second"] == pytest.approx(
        native["bytes"] / native["time"]["microseconds"] / 1e3
    )
    assert native["limit_share"] == pytest.approx(
        native["gb_per_second"] / found["copy_gb_per_second"]
    )
    assert {row["status"] for row in found["rows"]} <= {"passed", "rejected"}


def test_bench_plot(run: Run, tmp_path: Path) -> None:
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


def test_a_wrong_kernel_is_not_timed(tmp_path: Path) -> None:
    (tmp_path / "my_kernel.py").write_text(WRONG_KERNEL, encoding="utf-8")
    arguments = ("--tokens", "2", "--import", "my_kernel", "--json")
    done = run_anew("bench", "silu_and_mul", *SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    mine = next(r for r in json.loads(done.stdout)["rows"] if r["provider"] == "mine")
    assert (mine["status"], mine["time"]) == ("failed", None)


def test_bad_input_of_bench(run: Run, tmp_path: Path) -> None:
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
