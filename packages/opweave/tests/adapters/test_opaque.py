"""Implementations that are opaque torch ops, which plain calls skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from opweave import ir
from opweave.ir import IrOp
from opweave.kernels.wrap import mutating, opaque, undispatched

NAMESPACE = "opweave_tests_opaque"


class Ops(NamedTuple):
    tripled: IrOp
    doubled: IrOp


def tripled(x: Tensor) -> Tensor:
    return x * 3.0


def doubled(x: Tensor) -> Tensor:
    return x * 2.0


def triple(x: Tensor) -> Tensor:
    return torch.mul(x, 3.0)


def double(x: Tensor) -> None:
    torch.mul(x, 2.0, out=x)


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    with ir.isolated_registry():
        found = Ops(
            ir.register_op(tripled),
            ir.register_op(doubled, activations=["x"], allow_inplace=True),
        )
        found.tripled.register_impl("mine", traits={"differentiable"})(
            opaque(found.tripled, NAMESPACE)(triple)
        )
        traced = mutating(NAMESPACE, "double(Tensor(a!) x) -> ()")(double)

        def plain(x: Tensor) -> Tensor:
            double(x)
            return x

        @found.doubled.register_impl("mine", inplace=True)
        @undispatched(plain)
        def _(x: Tensor) -> Tensor:
            traced(x)
            return x

        yield found


class Seen(TorchDispatchMode):
    """A mode, for which calls are not plain."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def events(call: Any, *arguments: Tensor) -> set[str]:
    with profile() as found:
        call(*arguments)
    return {event.name for event in found.function_events}


def test_plain_calls_skip_the_torch_op(ops: Ops) -> None:
    op, x = ops.tripled, torch.randn(4)
    call, name = op.using("mine!"), f"{NAMESPACE}::tripled"
    for _ in range(2):  # the results of the first call are checked
        found = events(call, x)
        assert "aten::mul" in found
        assert name not in found
    assert torch.equal(call(x), x * 3)
    with Seen():
        assert name in events(call, x)


def test_gradients_are_those_of_the_function(ops: Ops) -> None:
    x = torch.randn(4, requires_grad=True)
    ops.tripled.using("mine!")(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))


def test_plain_donations_skip_the_torch_op(ops: Ops) -> None:
    op = ops.doubled
    call = op.using("mine!").maybe_inplace
    x = torch.ones(4)
    with torch.no_grad():
        version = x._version
        assert f"{NAMESPACE}::double" not in events(call, x)
        assert torch.equal(x, torch.full((4,), 2.0))
        assert x._version > version  # so that autograd finds values that it saved overwritten
        y = torch.ones(4)
        with Seen():
            assert f"{NAMESPACE}::double" in events(call, y)
    z = torch.ones(4)
    assert torch.equal(op.using("mine!")(z), z * 2)
    assert torch.equal(z, torch.ones(4))
