"""``benchmarks/gpu.py``, tried on the CPU with small models."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.testing import restored
from support import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # at the end: its engine.py is not tests/engine

import gpu
from engine_cells.models import SINGLE, write_config
from kernel_cells.shape import Shape


def test_the_most_important_rows_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:2] == ["values/paged_attention", "values/mla_attention_decode"]
    decode = names.index("decode/1")
    assert names[decode:][:4] == ["decode/1", "decode/8", "decode/64", "attention/512"]
    assert "norms/rms_norm/16" in names
    assert len({*names}) == len(names)
    groups = [gpu.GROUPS.index(name.partition("/")[0]) for name in names]
    assert groups == sorted(groups)
    assert gpu.main(["--dry-run", "--only", "decode/8", "norms"]) == 0
    chosen = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert chosen == [n for n in names if n == "decode/8" or n.startswith("norms/")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only", "decode/46"], "Did you mean 'decode/64'"),
        (["--only", "nroms"], "Did you mean 'norms'"),
        (["--budget", "-1"], "--budget -1 must be above zero"),
        ([], "finds no GPU"),
        (["--check"], "finds no GPU"),
    ],
)
def test_options_that_are_refused(
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1


def one_row() -> Iterator[dict[str, Any]]:
    yield {
        "name": "gpu.decode", "case": "a case", "value": 2.0, "unit": "us",
        "baseline": 3.0, "against": "eager", "ratio": 1.5,
    }  # fmt: skip


def failing() -> Iterator[dict[str, Any]]:
    yield from one_row()
    raise RuntimeError("no kernel image\nmore")


def test_rows_are_saved_until_the_budget_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [
        gpu.Task("norms/a", failing),
        gpu.Task("decode/1", one_row),
        gpu.Task("norms/b", one_row),
    ]
    monkeypatch.setattr(gpu, "tasks", lambda device, size: tasks)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    options = ["--device", "cpu", "--budget", "100"]
    assert gpu.main([*options, "--save"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "gpu.decode  a case: 2 us, 1.5 x eager",
        "gpu.norms  norms/a: RuntimeError: no kernel image",
        "gpu.decode  a case: 2 us, 1.5 x eager",
        "1 did not fit into the budget: decode/1",
    ]
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 3
    assert "| gpu.decode | a case | 2.0 |" in (tmp_path / "gpu.md").read_text()
    assert gpu.main([*options, "--json", "--only", "decode"]) == 0
    assert json.loads(capsys.readouterr().out)["missed"] == ["decode/1"]


def test_a_check_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.main(["--check", "--only", "decode"]) == 0
    assert not capsys.readouterr().out


def test_values_of_every_provider() -> None:
    op = ir.ops.paged_attention
    with restored(op):

        @op.register_impl("wrong")
        @functools.wraps(op.native)
        def wrong(*args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = op.native(*args, **kwargs) * 1.5
            return found

        @op.register_impl("refuses", supports_args=lambda query: False)
        @functools.wraps(op.native)
        def refuses(*args: Any, **kwargs: Any) -> Tensor:
            raise AssertionError("runs")

        rows = {row["case"]: row for row in gpu.values(op, "cpu")}
    assert rows["paged_attention, aten"]["value"] > 2
    assert "error" not in rows["paged_attention, aten"]
    assert "tolerance" in rows["paged_attention, wrong"]["error"]
    assert rows["paged_attention, refuses"]["value"] == 0
    assert not any("opweave_c" in case or "native" in case for case in rows)
    assert gpu._line(rows["paged_attention, aten"]).endswith(" calls right")


def test_transformers_decodes_the_same_with_a_static_cache(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model", SINGLE["tiny"])
    answers = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(1)
        model = gpu.Transformers(path, 2, 7, 5, "cpu", dtype=torch.float32, backend=backend)
        for _ in range(2):  # the second time, the cache is used again
            random.seed(2)
            assert len(model.steps()) == 5
            answers.append(model.answers)
    assert [len(answer) for answer in answers[0]] == [5, 5]
    assert answers[1:] == answers[:1] * 3


def check(rows: list[dict[str, Any]]) -> list[str]:
    """Check the contract of rows, and return the ends of their cases: the implementations."""
    json.dumps(rows)
    for row in rows:
        assert min(row["value"], row["baseline"], row["ratio"]) > 0
    return [row["case"].rpartition(", ")[2] for row in rows]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decoding_on_the_cpu(compiled: bool) -> None:
    [row] = gpu.decode(2, "cpu", "tiny", tokens=4, compiled=compiled)
    assert check([row]) == ["128 + 4 tokens"]
    assert row["limit_share"] > 0


def test_kernels_on_the_cpu() -> None:
    assert {"aten", "default"} <= {*check(list(gpu.attention(64, "cpu", 256)))}
    shape = Shape(4, 256, torch.bfloat16)
    rows = list(gpu.kernels("silu_and_mul", shape, "cpu", backend="eager"))
    assert "batch_invariant" in check(rows)
    assert all(row["limit_share"] > 0 for row in rows)
