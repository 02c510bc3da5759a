"""Kernels that end the process that verifies them, or never come back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opweave.conformance import Subject
from opweave.conformance.snapshot import checking_environment
from opweave.conformance.subject import VerifierFailedError
from opweave.conformance.subprocess import Verifier, VerifyTask
from opweave.ir.ops import silu_and_mul
from support.processes import is_alive, wait_until

KERNELS = """
import ctypes
import os
import time

import torch
from opweave import ir

op = ir.ops.silu_and_mul


@op.register_impl("crashes")
def crashes(x):
    if x.shape[0] == 7:
        ctypes.string_at(0)
    return op.native(x)


@op.register_impl("exits")
def exits(x):
    if x.dtype is torch.bfloat16:
        os._exit(0)
    return op.native(x)


@op.register_impl("hangs")
def hangs(x):
    while not x.numel():
        time.sleep(1)
    return op.native(x)


@op.register_impl("writes_behind")
def writes_behind(x):
    out = op.native(x)
    if type(out) is torch.Tensor and out.numel() % 16:
        ctypes.memset(out.data_ptr() + out.untyped_storage().nbytes(), 1, 4)
    return out


@op.register_impl("right")
def right(x):
    print("not a result")
    return op.native(x)


@op.register_impl("refuses", supports_args=lambda x: os._exit(3))
def refuses(x):
    return op.native(x)
"""


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    (tmp_path / "kernels_that_end.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    checks = ("values", "mutation", "empty", "keywords")
    return Verifier(VerifyTask(("kernels_that_end",), checks, 0), timeout=10.0)


def test_what_ends_the_process_is_a_problem_of_the_case(verifier: Verifier) -> None:
    with verifier:
        found = {
            name: verifier.verify(Subject(silu_and_mul, name))
            for name in ("crashes", "exits", "hangs", "refuses", "right")
        }
    statuses = {name: result.status for name, result in found.items()}
    assert statuses == {**dict.fromkeys(found, "failed"), "right": "passed"}
    problems = {name: result.outcomes[-1].problems for name, result in found.items()}
    case = "silu_and_mul(float32[7, 128] cpu) [num_tokens=7, dtype=float32]"
    assert problems["crashes"] == [f"ended the process with SIGSEGV: {case}"]
    (exits,) = problems["exits"]
    assert exits.startswith("ended the process with exit code 0: silu_and_mul(bfloat16[1, ")
    (hangs,) = problems["hangs"]
    assert hangs.startswith("did not come back within 10 s: silu_and_mul(float32[0, 128] cpu)")
    assert problems["refuses"] == ["ended the process with exit code 3"]
    # Earlier findings are kept, and the remaining checks are skipped.
    assert [outcome.check for outcome in found["hangs"].outcomes] == ["values", "empty"]
    assert [outcome.check for outcome in found["right"].outcomes] == [
        "values", "empty", "mutation", "keywords",
    ]  # fmt: skip


@pytest.mark.skipif(not checking_environment(), reason="no glibc, or another allocator is loaded")
def test_writing_behind_a_result_is_found(verifier: Verifier) -> None:
    with verifier:
        result = verifier.verify(Subject(silu_and_mul, "writes_behind"))
    assert result.status == "failed"
    (problem,) = result.outcomes[-1].problems
    assert "SIGABRT, as where memory behind a result is written" in problem


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "kernels_that_end.py").write_text(KERNELS, encoding="utf-8")
    command = [sys.executable, "-m", "opweave", "verify", "--provider", "hangs"]
    options = ["--import", "kernels_that_end", "--check", "empty"]
    parent = subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    wait_until(children.read_text)
    (pid,) = map(int, children.read_text().split())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(pid))


def test_a_process_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_ends.py").write_text("import os; os._exit(4)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    refused = pytest.raises(VerifierFailedError, match="exit code 4 before it began")
    with Verifier(VerifyTask(("module_that_ends",), (), 0), timeout=10.0) as verifier, refused:
        verifier.verify(Subject(silu_and_mul, "native"))
