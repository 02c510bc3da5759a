"""No-op elimination, before ops are fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir

from .conftest import compiled

W = torch.ones(8)


def reshapes(x: Tensor) -> Tensor:
    return x.sin().view(4, 2, 8).view(2, 4, 8).view(-1, 8)


def whole_slices(x: Tensor) -> Tensor:
    return x.sin()[:, :][0:8, 0:][:, 0:100].expand(8, 8).permute(0, 1)


def scattered_whole(x: Tensor) -> Tensor:
    return torch.slice_scatter(x.cos(), x.sin(), 0, 0, 100)


def count(program: Callable[[Tensor], Tensor]) -> int:
    """Return how many nodes are left of *program* before an op, its result checked."""

    def whole(x: Tensor) -> Tensor:
        return ir.ops.rms_norm(program(x), W, 1e-5)

    x = torch.randn(8, 8)
    run = compiled(whole)
    torch.testing.assert_close(run(x), whole(x))
    first = next(p for p in opweave.compile.report().passes if p.name == "lower functional")
    return sum(line.count("torch.ops.aten") for line in first.before.splitlines())


@pytest.mark.parametrize("program", [reshapes, whole_slices, scattered_whole])
def test_noops_are_removed(program: Callable[[Tensor], Tensor]) -> None:
    with ir.priority(rms_norm="native"):
        assert count(program) == count(torch.sin)


def test_a_scattered_output_is_not_made_an_alias() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = ir.ops.rms_norm(x, W, 1e-5)
        new = torch.slice_scatter(x.cos(), y.sin(), 0, 0, 100)
        of_input = torch.slice_scatter(x.cos(), x, 0, 0, 100)
        of_output = torch.slice_scatter(x.cos(), y, 0, 0, 100)
        return new, of_input, of_output, y

    x = torch.randn(8, 8)
    run = compiled(program)
    expected, found = program(x), run(x)
    torch.testing.assert_close(found, expected)
    assert len({t.data_ptr() for t in (x, *found)}) == 5
    [step] = [p for p in opweave.compile.report().passes if p.name == "eliminate noops"]
    assert step.before.count("aten.slice_scatter") == 3
    assert step.after.count("aten.slice_scatter") == 2


def test_a_slice_that_is_whole_for_one_size_only_stays() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return ir.ops.rms_norm((x * 2)[: len(y)], W, 1e-5) + y.sum()

    run = compiled(program, dynamic=True)
    for rows in (6, 4):
        inputs = torch.randn(6, 8), torch.randn(rows, 8)
        torch.testing.assert_close(run(*inputs), program(*inputs))
