"""Programs that other systems get wrong, with code generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir

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


PROGRAMS = [
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
    input_updated,
    constant,
    branches,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("codegen", [False, pytest.param(True, marks=pytest.mark.timeout(300))])
def test_compiled_is_eager(program: Callable[[Tensor], Any], codegen: bool) -> None:
    x = torch.randn(8, 32)
    given, expected_input, constant_before = x.clone(), x.clone(), CONSTANT.clone()
    expected = program(expected_input)
    compiled = torch.compile(
        program, backend=opweave.compile.backend, fullgraph=True, options={"codegen": codegen}
    )
    for _ in range(2):  # the second call would find a constant that the first has overwritten
        given = x.clone()
        for found, wanted in zip(compiled(given), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(given, expected_input)
    assert torch.equal(CONSTANT, constant_before)


def test_reuse_happens_where_it_may() -> None:
    compiled = torch.compile(
        chained, backend=opweave.compile.backend, fullgraph=True, options={"codegen": False}
    )
    compiled(torch.randn(8, 32))
    decisions = [r for node in opweave.compile.report().nodes for r in node.reuse]
    assert [d.reused for d in decisions] == [True] * 4
