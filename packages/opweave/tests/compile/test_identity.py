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
from .conftest import all_native, compiled


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


# No-op elimination, before ops are fused.

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
