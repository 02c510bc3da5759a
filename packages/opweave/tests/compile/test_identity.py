"""Where every op is native, the generated code is the one that plain torch.compile generates."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import opweave.compile
from opweave import ir
from opweave.ir.testing import written_out
from support.devices import DEVICES

from .blocks import SHIPPED, Model, NativeCalls, OpCalls, model_inputs
from .conftest import all_native


def generated(backend: Any, model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, list[str]]:
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True)
    result, code = run_and_get_code(compiled, *inputs)
    assert len(code) == 1
    return result, statements(code[0])


def statements(code: str) -> list[str]:
    """The lines of generated code, without comments, which name the nodes of the graph."""
    lines = (line.rstrip() for line in code.splitlines())
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def check_native(model: nn.Module, inputs: Sequence[Tensor], expected: Any, plain: Any) -> None:
    """Compile with every op native, and compare the result and the code."""
    with ir.priority(all_native()):
        found, ours = generated(opweave.compile.backend, model, inputs)
    report = opweave.compile.report()
    assert {node.chosen for node in report.nodes} == {"native"}
    assert report.complete
    difference = list(difflib.unified_diff(plain, ours, lineterm="", n=0))
    assert difference == []
    if found.is_cuda:  # the size of a block, so the order of a sum, is what was fastest at the time
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


both_modes = pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])


@both_modes
@pytest.mark.parametrize("device", DEVICES)
def test_no_line_differs(dynamic: bool, device: str) -> None:
    torch.manual_seed(1)
    inputs = [tensor.to(device) for tensor in model_inputs(16)]
    for tensor in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    plain = generated("inductor", Model(2, NativeCalls()).to(device), inputs)
    check_native(Model(2, OpCalls()).to(device), inputs, *plain)


@pytest.mark.parametrize(
    "name", ["quantized", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "mixtral"))]
)
@both_modes
@pytest.mark.parametrize("device", DEVICES)
def test_no_line_differs_for_shipped_models(name: str, dynamic: bool, device: str) -> None:
    torch.manual_seed(1)
    model = SHIPPED[name]().to(device)
    both = torch.stack([torch.randint(0, 99, (16,)), torch.arange(16)]).to(device)
    if dynamic:
        torch._dynamo.mark_dynamic(both, 1)
    with ir.priority(all_native()), written_out():  # attention is an op when the graph runs
        plain = generated("inductor", model, [both])
    check_native(model, [both], *plain)
