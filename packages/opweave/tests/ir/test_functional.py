"""The default overload is functional, even if the implementation works in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir

PLAIN = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def adder(registry: ir.Registry) -> ir.IrOp:
    """``(x + y + w, y + w)`` with an implementation that writes to ``x`` and ``y``."""

    def adder(
        x: Tensor, xy: Tensor, w: Tensor | None = None, *, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = xy if w is None else xy + w
        return (x + total) * scale, total.clone()

    op = ir.register_op(allow_inplace=True)(adder)

    @op.register_impl("alpha", inplace=True)
    def _(x, xy, w=None, *, scale=1.0):
        total = xy if w is None else xy.add_(w)
        return x.add_(total).mul_(scale), total

    op.set_default(["alpha!"])
    return op


def calls_of(op: ir.IrOp) -> dict[str, Callable[..., Any]]:
    return {"op": op, "using": op.using("alpha"), "torch op": op.torch_op}


@pytest.mark.parametrize("way", ["op", "using", "torch op"])
def test_one_tensor_in_two_slots_is_not_changed(adder: ir.IrOp, way: str) -> None:
    x = PLAIN.clone()
    before, expected = x.clone(), adder.native(x, x, x)
    for args in ((x, x, x), (x, x.view(-1).view(4, 6), x)):
        for _ in range(2):
            result = calls_of(adder)[way](*args)
            assert all(map(torch.equal, result, expected))
            assert torch.equal(x, before)


def test_overlapping_views_in_two_slots_are_not_changed(adder: ir.IrOp) -> None:
    memory = torch.arange(30.0)
    x, xy = memory[:24].view(4, 6), memory[6:].view(4, 6)
    before, expected = memory.clone(), adder.native(x, xy)
    assert all(map(torch.equal, adder(x, xy), expected))
    assert torch.equal(memory, before)


def test_a_differentiable_implementation_in_place_changes_no_input(registry: ir.Registry) -> None:
    op = ir.register_op(name="doubled", allow_inplace=True)(lambda_double)
    op.register_impl("alpha", inplace=True, traits={"differentiable"})(lambda x: x.mul_(2))
    op.set_default(["alpha!"])
    leaf = torch.ones(3, requires_grad=True)
    for call in (op, op.using("alpha"), op.torch_op):
        x = leaf * 1
        y = call(x)
        assert torch.equal(x, torch.ones(3))
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
        assert torch.equal(gradient, torch.full((3,), 2.0))


def lambda_double(x: Tensor) -> Tensor:
    return x * 2


def test_an_activation_may_be_none(registry: ir.Registry) -> None:
    def pair(x: Tensor, x_other: Tensor | None) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    try:
        op = ir.register_op(allow_inplace=True)(pair)
    except ir.IrError:
        return  # refused at declaration

    @op.register_impl("alpha", inplace=True)
    def _(x, x_other):
        other = x + 2
        return x.add_(1), other

    op.set_default(["alpha!"])
    x = torch.zeros(2)
    for _ in range(2):
        assert torch.equal(op(x, None)[0], x + 1)
