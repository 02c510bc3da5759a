"""Under ``torch.autocast``, a compiled op is its native implementation as eager mode runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir

from .conftest import compiled

BF16 = torch.bfloat16
X, W = torch.randn(4, 8), torch.randn(8, 8)


@pytest.fixture(autouse=True)
def project() -> Iterator[ir.IrOp]:
    """An op that casts under autocast, and one made of it that lets only a part of it cast."""
    with ir.isolated_registry():

        @ir.register_op
        def project(x: Tensor, weight: Tensor) -> Tensor:
            return torch.mm(x, weight)

        @ir.register_op(allow_inplace=True)
        def project_twice(x: Tensor, weight: Tensor, factor: float = 2.0) -> Tensor:
            y = project(x, weight).float()
            with torch.autocast("cpu", enabled=False):
                return y + project(x.float(), weight) * factor

        @project.register_impl("vendor")
        def _(x: Tensor, weight: Tensor) -> Tensor:
            return torch.mm(x, weight) * 1.5

        yield project


def alone(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = ir.ops.project(x, w)
    return found


def strictly(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = ir.ops.project.using("vendor!")(x, w)
    return found


def twice(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = ir.ops.project_twice.maybe_inplace(x * 2, w, 3.0)
    return found


def inside(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    before = ir.ops.project(x, w)
    with torch.autocast("cpu", dtype=BF16):
        y = ir.ops.project(x, w)
        with torch.autocast("cpu", enabled=False):
            z = ir.ops.project(x, w)
        again = ir.ops.project.using("native")(y, w)
    return before, y, z, again, twice(x, w)


def check(function: Callable[..., Any], **options: Any) -> list[torch.dtype]:
    expected, found = function(X, W), compiled(function, **options)(X, W)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        exact = {} if options.get("codegen") else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(got, wanted, **exact)
    stages = {n.stage for n in opweave.compile.report().nodes}
    assert stages == {"lower functional"}, "nothing is left to the op's own kernel"
    return [got.dtype for got in found]


@pytest.mark.parametrize("codegen", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_in_the_function(codegen: bool) -> None:
    f32 = torch.float32
    assert check(inside, codegen=codegen) == [f32, BF16, f32, BF16, f32]
    assert [n.op for n in opweave.compile.report().nodes].count("project") == 6


def test_around_the_call() -> None:
    function = compiled(lambda x, w: (ir.ops.project(x, w), twice(x, w)))
    with torch.autocast("cpu", dtype=BF16):
        expected, found = (ir.ops.project(X, W), twice(X, W)), function(X, W)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    assert found[0].dtype == BF16
    assert function(X, W)[0].dtype == torch.float32, "without it, another graph"


def test_kernels_are_passed_over() -> None:
    with ir.priority(project=["vendor"]), torch.autocast("cpu", dtype=BF16):
        found = compiled(alone)(X, W)
    assert torch.equal(found, torch.mm(X.bfloat16(), W.bfloat16()))
    (node,) = opweave.compile.report().nodes
    assert node.chosen == "native"
    assert [(r.provider, r.reason) for r in node.rejected] == [("vendor", "torch.autocast is on")]


def test_a_kernel_that_must_run_is_an_error() -> None:
    with torch.autocast("cpu", dtype=BF16), pytest.raises(Exception, match="vendor! is required"):
        compiled(strictly)(X, W)


def test_control_flow_in_a_block() -> None:
    def branch(x: Tensor, w: Tensor) -> Tensor:
        return ir.ops.project(x, w).float()

    def function(x: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return torch.cond(x.sum() > 0, branch, lambda x, w: x * 2, (x, w))

    x = X.abs()
    assert torch.equal(compiled(function)(x, W), torch.mm(x.bfloat16(), W.bfloat16()).float())


def test_a_fake_that_knows_nothing_of_it_is_an_error(project: ir.IrOp) -> None:
    project.register_fake(lambda x, weight: x.new_empty(len(x), weight.shape[1]))
    with torch.autocast("cpu", dtype=BF16), pytest.raises(Exception, match="its fake"):
        compiled(alone)(X, W)


def test_native_that_cannot_be_traced_runs_under_it() -> None:
    @ir.register_op
    def counted(x: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            raise RuntimeError("looks at elements")
        return torch.mm(x, weight)

    @counted.register_fake
    def _(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor]:
        with torch.autocast("cpu", dtype=BF16):
            return (ir.ops.counted(x, w),)

    (found,) = compiled(function)(X, W)
    assert torch.equal(found, torch.mm(X.bfloat16(), W.bfloat16()))
    assert opweave.compile.report().nodes[0].stage.startswith("kept as a call")


def test_ops_that_autocast_does_not_change() -> None:
    """Their definitions and kernels are lowered as without autocast, as eager mode runs them."""

    @ir.register_op(autocast=False)
    def attend(x: Tensor, weight: Tensor) -> Tensor:
        scores = x.float() @ weight.float()
        return scores.masked_fill(scores < 0, torch.finfo(torch.float32).min).to(x.dtype)

    @ir.register_op
    def attend_twice(x: Tensor, weight: Tensor) -> Tensor:
        return ir.ops.attend(torch.mm(x, weight), weight)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=BF16):
            inner = ir.ops.attend(x, w), ir.ops.attend_twice(x, w)
        return *inner, ir.ops.attend(x, w), ir.ops.attend_twice(x, w)

    assert check(function) == [torch.float32, BF16, torch.float32, torch.float32]
    with torch.autocast("cpu", dtype=BF16):
        assert check(function) == [torch.float32, BF16, torch.float32, BF16]
    attend.register_impl("vendor")(lambda x, weight: torch.mm(x, weight) * 2)
    with ir.priority(attend=["vendor"]), torch.autocast("cpu", dtype=BF16):
        result = compiled(ir.ops.attend)(X, W)
        assert torch.equal(result, ir.ops.attend(X, W))
    assert torch.equal(result, torch.mm(X, W) * 2)
