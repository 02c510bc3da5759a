"""``all_reduce_rms_norm``: what it computes, and that a kernel for it is found in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional_collectives

import opweave.compile
from opweave import ir
from opweave.compile.match import derivation
from opweave.ir.testing import restored

op = ir.ops.all_reduce_rms_norm
X, RESIDUAL, WEIGHT = torch.randn(12, 8), torch.randn(12, 8), torch.randn(8)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of two that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()
    distributed.destroy_process_group()


@pytest.fixture
def vendor() -> Iterator[list[str]]:
    """A kernel, which notes the groups that it was called with."""
    groups: list[str] = []
    with restored(op):

        @op.register_impl("vendor", supports_args=ir.rules.contiguous("x"))
        def _(
            x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str = "0"
        ) -> tuple[Tensor, Tensor]:
            groups.append(group)
            y, s = ir.ops.fused_add_rms_norm.native(x * 2, x_residual, weight, epsilon)
            return y, s

        yield groups


def composed(x: Tensor, residual: Tensor, group: Any = None) -> tuple[Tensor, Tensor]:
    group = group or distributed.group.WORLD
    summed = functional_collectives.all_reduce(x, "sum", group)
    y, s = ir.ops.fused_add_rms_norm.maybe_inplace(summed, residual, WEIGHT, 1e-5)
    return y, s


def in_pieces(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    s = residual + functional_collectives.all_reduce(x, "sum", distributed.group.WORLD)
    return ir.ops.rms_norm(s, WEIGHT, 1e-5), s


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("weight", [WEIGHT, None], ids=["weight", "no weight"])
@pytest.mark.parametrize("donated", [False, True])
def test_a_sum_over_one_rank(weight: Tensor | None, donated: bool) -> None:
    x, residual = X.clone(), RESIDUAL.clone()
    call = op.maybe_inplace if donated else op
    y, s = call(x, residual, weight, 1e-5)
    assert torch.equal(s, X + RESIDUAL)
    normalized = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(y, normalized if weight is None else normalized * weight)
    if not donated:
        assert torch.equal(x, X)
        assert torch.equal(residual, RESIDUAL)


def test_without_a_group_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="process group registered under the name nowhere"):
        op(X, RESIDUAL, WEIGHT, 1e-5, "nowhere")


def test_its_patterns_need_no_group() -> None:
    found = derivation(op)
    assert found.failures == ()
    assert {pattern.variant for pattern in found.patterns} == {""}  # one pattern for any weight


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("function", [composed, in_pieces])
def test_a_kernel_is_found(function: Callable[..., Any], vendor: list[str]) -> None:
    with ir.priority(all_reduce_rms_norm=["vendor"]):
        found = compiled(function)(X, RESIDUAL.clone())
    expected = ir.ops.fused_add_rms_norm.native(X * 2, RESIDUAL, WEIGHT, 1e-5)
    torch.testing.assert_close(tuple(found), tuple(expected))
    assert set(vendor) == {"0"}
    report = opweave.compile.report()
    assert report.selected_impls["all_reduce_rms_norm"]
    assert [f.op for f in report.fusions if f.outcome == "fused"] == [op.name]
    assert report.collectives == {}, "the kernel moves the data, so that nothing is to be sharded"


@pytest.mark.usefixtures("group")
def test_a_group_of_another_name(vendor: list[str]) -> None:
    other = distributed.new_group([0, 1])
    assert other.group_name != "0"
    with ir.priority(all_reduce_rms_norm=["vendor"]):
        compiled(partial(composed, group=other))(X, RESIDUAL.clone())
    assert set(vendor) == {other.group_name}
    fused = [f for f in opweave.compile.report().fusions if f.outcome == "fused"]
    assert [f.op for f in fused] == [op.name]


@pytest.mark.usefixtures("group")
def test_without_a_kernel_it_is_not_formed(vendor: list[str]) -> None:
    compiled(composed)(X, RESIDUAL.clone())
    assert vendor == []
    assert "all_reduce_rms_norm" not in opweave.compile.report().selected_impls


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(
        function, backend=opweave.compile.backend, fullgraph=True, options={"codegen": False}
    )
