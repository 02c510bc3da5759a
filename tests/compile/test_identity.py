"""Where every op is native, the generated code is the one that plain torch.compile generates."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import opweave.compile
from opweave import ir

from .blocks import BLOCKS, Model, NativeCalls, OpCalls, model_inputs
from .conftest import all_native


def generated(backend: Any, calls: Any, block: str, *, dynamic: bool) -> tuple[Any, list[str]]:
    torch.compiler.reset()
    model = Model(BLOCKS[block], 2, calls)
    inputs = model_inputs(16)
    if dynamic:
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True)
    result, code = run_and_get_code(compiled, *inputs)
    assert len(code) == 1
    return result, statements(code[0])


def statements(code: str) -> list[str]:
    """The lines of generated code, without comments, which name the nodes of the graph."""
    lines = (line.rstrip() for line in code.splitlines())
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("block", sorted(BLOCKS))
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_line_differs(block: str, dynamic: bool) -> None:
    torch.manual_seed(1)
    expected, plain = generated("inductor", NativeCalls(), block, dynamic=dynamic)
    torch.manual_seed(1)
    with ir.priority(all_native()):
        found, ours = generated(opweave.compile.backend, OpCalls(), block, dynamic=dynamic)
    report = opweave.compile.report()
    assert {node.chosen for node in report.nodes} == {"native"}
    assert report.complete
    difference = list(difflib.unified_diff(plain, ours, lineterm="", n=0))
    assert difference == []
    assert torch.equal(found, expected)


def test_graphs_without_ops_are_left_alone() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()

    x = torch.randn(4, 5)
    compiled = torch.compile(plain, backend="opweave", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


def test_lowering_traces_signatures_not_layers() -> None:
    traces = []
    for layers in (2, 6):
        torch.compiler.reset()
        model = Model(BLOCKS["llama"], layers, OpCalls())
        compiled = torch.compile(model, backend=opweave.compile.backend, options={"codegen": False})
        with ir.priority(all_native()):
            compiled(*model_inputs(8))
        report = opweave.compile.report()
        traces.append(report.traces)
        assert len(report.nodes) >= 5 * layers
    assert traces[0] == traces[1]
