"""The random programs of ``tests/runs/programs``, and programs that were once wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from runs.programs.examine import differences, examine
from runs.programs.kernels import Library, open_library
from runs.programs.program import Program, Settings
from support import ROOT

from .conftest import compiled

PROGRAMS = ROOT / "tests" / "runs" / "programs"


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with ir.isolated_registry():
        yield open_library()


# One graph of eight programs for each provider, in several modes.
SEEDS = [1, 2, 5, 7, 9, 14, 19]


@pytest.mark.filterwarnings("ignore::opweave.ir.errors.GradientFallbackWarning")
@pytest.mark.parametrize(
    ("seeds", "codegen"),
    [
        *(pytest.param([seed], False, id=f"seed {seed}") for seed in SEEDS),
        *(
            pytest.param(
                range(1000, 1050),
                codegen,
                marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
                id=f"400 programs, codegen={codegen}",
            )
            for codegen in (False, True)
        ),
    ],
)
def test_random_programs(library: Library, seeds: Iterable[int], codegen: bool) -> None:
    findings = [finding for seed in seeds for finding in examine(seed, library, 8, codegen)[1]]
    assert [finding.to_json() for finding in findings if not finding.torch] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_programs_that_spell_ops_in_plain_pytorch() -> None:
    """In a process of its own: only opweave's own ops have spellings, in the default registry."""
    options = ["--programs", "200", "--seed", "1", "--spellings", "0.6", "--codegen", "never"]
    assert run(*options)["recognized"] > 100


@pytest.mark.parametrize(
    "programs", [100, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
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
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KNOWN)
def test_known_programs(library: Library, name: str, dynamic: bool) -> None:
    steps, result, provider = KNOWN[name]
    settings = Settings(
        provider, "no_grad", dynamic=dynamic, codegen=True, inplace=True, fusion=True
    )
    program = Program(steps, (result,), "apart", "float32", seed=1)
    assert differences([program], settings, library, "opweave") == ""


# Programs that other systems get wrong.


W = torch.ones(32)
F = ir.ops.fused_add_rms_norm


def base_read_later(x: Tensor) -> Any:
    y = x.sin()
    o, b = F(x.cos(), y, W, 1e-5)
    return o, b, torch.mm(y, y.t())


def view_of_an_intermediate(x: Tensor) -> Any:
    y = x.sin()
    o, b = F(x[:4].cos(), y[:4], W, 1e-5)
    return o, b, torch.mm(y, y.t())


def overlapping_views(x: Tensor) -> Any:
    y = x.sin()
    return tuple(F(y[:4], y[2:6], W, 1e-5))


def same_tensor_twice(x: Tensor) -> Any:
    y = x.sin()
    return tuple(F(y, y, W, 1e-5))


def chained(x: Tensor) -> Any:
    o, b = F(x.cos(), x.sin(), W, 1e-5)
    o2, b2 = F(torch.mm(o, o.t()) @ o, b, W, 1e-5)
    return o2, b2


def returned_twice(x: Tensor) -> Any:
    o, b = F(x.cos(), x.sin(), W, 1e-5)
    o2, b2 = F(o, b, W, 1e-5)
    return o, b, o2, b2


def user_clone(x: Tensor) -> Any:
    y = x.sin()
    kept = y.clone()
    o, b = F.maybe_inplace(y, x.cos(), W, 1e-5)
    return o, b, kept


def expanded(x: Tensor) -> Any:
    return tuple(F(x.cos(), x[:1].expand(8, 32), W, 1e-5))


def transposed(x: Tensor) -> Any:
    y = (x.t() * 2).contiguous().t()
    return tuple(F(y, x.sin(), W, 1e-5))


def written_by_others(x: Tensor) -> Any:
    y = x.sin()
    o, b = F(x.cos(), y, W, 1e-5)
    y.mul_(3)
    return o, b, y


def input_updated(x: Tensor) -> Any:
    o, b = F(x * 1, x, W, 1e-5)
    x.add_(o)
    return o, b


def constant(x: Tensor) -> Any:
    return tuple(F(x * 2, CONSTANT, W, 1e-5))


CONSTANT = torch.randn(8, 32)


def branches(x: Tensor) -> Any:
    def yes(t: Tensor) -> Tensor:
        return F(t * 1, t, W, 1e-5)[0]

    def no(t: Tensor) -> Tensor:
        return ir.ops.rms_norm(t, W, 1e-5)

    return (torch.cond(x.sum() > 0, yes, no, (x,)),)


# The last one writes to its input.
FUNCTIONS = [
    base_read_later,
    view_of_an_intermediate,
    overlapping_views,
    same_tensor_twice,
    chained,
    returned_twice,
    user_clone,
    expanded,
    transposed,
    written_by_others,
    constant,
    branches,
    input_updated,
]


def all_of_them(x: Tensor) -> Any:
    return [value for program in FUNCTIONS for value in program(x)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "codegen"), [*((program, False) for program in FUNCTIONS), (all_of_them, True)]
)
def test_compiled_is_eager(program: Callable[[Tensor], Any], codegen: bool) -> None:
    x = torch.randn(8, 32)
    given, expected_input, constant_before = x.clone(), x.clone(), CONSTANT.clone()
    expected = program(expected_input)
    run = compiled(program, codegen=codegen)
    for _ in range(2):  # the second call would find a constant that the first has overwritten
        given = x.clone()
        for value, reference in zip(run(given), expected, strict=True):
            torch.testing.assert_close(value, reference, atol=1e-4, rtol=1e-4)
    assert torch.equal(given, expected_input)
    assert torch.equal(CONSTANT, constant_before)
    if program is chained:
        decisions = [r for node in opweave.compile.report().nodes for r in node.reuse]
        assert [d.reused for d in decisions] == [True] * 4
