"""The random programs of ``tests/runs/programs``, a few of them and many."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from opweave import ir
from runs.programs.examine import differences, examine
from runs.programs.kernels import Library, open_library
from runs.programs.program import Program, Settings
from support import ROOT

PROGRAMS = ROOT / "tests" / "runs" / "programs"


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with ir.isolated_registry():
        yield open_library()


def check(library: Library, seeds: range, codegen: bool) -> None:
    found = [each for seed in seeds for each in examine(seed, library, 8, codegen)[1]]
    assert [each.to_json() for each in found if not each.torch] == []


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
def test_a_few_programs(library: Library) -> None:
    check(library, range(3), codegen=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
@pytest.mark.parametrize("codegen", [False, True])
def test_many_programs(library: Library, codegen: bool) -> None:
    check(library, range(1000, 1025), codegen)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_programs_that_spell_ops_in_plain_pytorch() -> None:
    """In a process of its own: only opweave's own ops have spellings, in the default registry."""
    options = ["--programs", "200", "--seed", "1", "--spellings", "0.6", "--codegen", "never"]
    assert run(*options)["recognized"] > 100


@pytest.mark.parametrize(
    "programs", [300, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_near_misses(programs: int) -> None:
    """In a process of its own: opweave's own ops get kernels there."""
    # These seeds found 14 programs that a matcher changed which ignored parts of tuples.
    outcome = run("--near-misses", "--seed", "300", "--programs", str(programs))
    assert outcome["recognized"] > programs / 20  # the change was a harmless one
    assert outcome["fused"] > programs / 20


def run(*options: str) -> dict[str, Any]:
    """Run the program; return its counts."""
    command = [sys.executable, str(PROGRAMS), *options, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


KNOWN = {
    "a_kernel_copies_its_input": (("x0 = ops.halves(b, shift=0.25)",), "x0", "functional"),
    "a_fused_loop_writes_in_place": (
        (
            "x2 = ops.norm(a, None, 1e-5)",
            "x3, y3 = ops.add_norm(x2, a.expand_as(x2), None, 1e-5)",
            "x4 = x3[:1].expand(4, -1)",
            "b.zero_()",
        ),
        "x4",
        "crossed",
    ),
    "a_half_of_a_result_is_written": (
        (
            "x0, y0 = ops.add_norm.maybe_inplace(b * 2, b + 1, None, 1e-5)",
            "x2, y2 = x0.chunk(2, -1)",
            "y2.t().mul_(2)",
        ),
        "y2",
        "inplace",
    ),
    "kernels_in_place_follow_each_other": (
        (
            "x0 = a.tanh() * a.mean(-1, keepdim=True)",
            "x1 = (a * 2).view(torch.int16).view(a.dtype)",
            "x4, y4 = ops.add_norm(x1, x0, None, 1e-5)",
            "x6, y6 = ops.add_norm(x4, b, None, 1e-5)",
        ),
        "x6",
        "both_forms",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_known_programs(library: Library, name: str, dynamic: bool) -> None:
    steps, result, provider = KNOWN[name]
    settings = Settings(
        provider, "no_grad", dynamic=dynamic, codegen=True, inplace=True, fusion=True
    )
    program = Program(steps, (result,), "apart", "float32", seed=1)
    assert differences([program], settings, library, "opweave") == ""
