"""Opaque ops: one node of a graph, differentiable, and there as long as the process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave.ir.torch_ops import Function, opaque_op


def scaled_sine(x: Tensor, factor: float = 2.0) -> Tensor:
    for _ in range(len(x)):  # tracers that look in here unroll it
        x = x * 1.0
    return x.sin() * factor


@pytest.fixture(scope="module")
def op() -> Function:
    made = opaque_op(
        "opweave_tests", "scaled_sine", scaled_sine, lambda x, factor=2.0: x.new_empty(x.shape)
    )
    gc.collect()
    return made


def test_the_schema_is_of_the_annotations(op: Function) -> None:
    assert str(torch.ops.opweave_tests.scaled_sine.default._schema).endswith(
        "scaled_sine(Tensor x, float factor=2.) -> Tensor"
    )


def test_values(op: Function) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(op(x), x.sin() * 2)
    assert torch.equal(op(x, factor=3.0), x.sin() * 3)
    with torch.inference_mode():
        assert torch.equal(op(x, 3.0), x.sin() * 3)


@pytest.mark.parametrize("keyword", [False, True])
def test_gradients(op: Function, keyword: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (op(x=x) if keyword else op(x)).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_a_graph_has_one_node(op: Function) -> None:
    nodes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: op(x, 3.0), backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            assert torch.equal(compiled(x), op(x, 3.0))
    assert nodes == [op]


def test_opcheck(op: Function) -> None:
    x = torch.randn(3, 4)
    torch.library.opcheck(op, (x, 0.5), test_utils=("test_schema", "test_faketensor"))
