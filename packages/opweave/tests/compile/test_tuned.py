"""Compiled graphs choose by the number of tokens as eager calls do, if the size is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.compile import report
from opweave.ir.priority import PriorityEntry, SizeRange

from .conftest import compiled


def tuned(provider: str) -> tuple[PriorityEntry, ...]:
    return (PriorityEntry(provider, False, "tuned"),)


@pytest.fixture
def op() -> Iterator[ir.IrOp]:
    op = ir.ops.silu_and_mul
    ranges = [
        SizeRange(2, tuned("batch_invariant")), SizeRange(8, ()), SizeRange(None, tuned("native"))
    ]  # fmt: skip
    op.registry.settings.set_tuned({op.name: ranges})
    torch._dynamo.reset()
    yield op
    op.registry.settings.set_tuned({})
    torch._dynamo.reset()


def provider(op: ir.IrOp, x: Tensor, *, dynamic: bool | None = None) -> str:
    """Compile a call of the op, check its result, and return the provider."""
    function = torch.compile(
        lambda x: op(x) + 1, backend="opweave", dynamic=dynamic, options={"codegen": False}
    )
    torch.testing.assert_close(function(x), op.native(x) + 1)
    [node] = report().nodes
    return node.chosen


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 40])
def test_static_shapes_choose_as_eager(op: ir.IrOp, tokens: int) -> None:
    x = torch.randn(tokens, 16)
    assert provider(op, x, dynamic=False) == op.dispatch(x).provider == ir.explain(op, x).chosen


@pytest.mark.parametrize(
    ("bounds", "chosen"),
    [
        ({}, "opweave_c"),  # 2 to any number
        ({"min": 9, "max": 64}, "native"),
        ({"min": 3, "max": 8}, "opweave_c"),
        ({"min": 8, "max": 64}, "opweave_c"),  # in two ranges
    ],
)
def test_dynamic_shapes_choose_where_the_whole_range_agrees(
    op: ir.IrOp, bounds: dict[str, int], chosen: str
) -> None:
    x = torch.randn(8 if bounds.get("max") == 8 else 20, 16)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    assert provider(op, x) == chosen


def test_another_tuning_file_compiles_again(op: ir.IrOp) -> None:
    function = compiled(op)
    x = torch.randn(1, 16)
    function(x)
    assert [node.chosen for node in report().nodes] == ["batch_invariant"]
    op.registry.settings.set_tuned({})
    torch.testing.assert_close(function(x), op.native(x))
    assert [node.chosen for node in report().nodes] == ["opweave_c"]
