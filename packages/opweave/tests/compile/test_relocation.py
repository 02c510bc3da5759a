"""Copies of a trace have its fake values in memory of their own, and nothing is computed again."""

from __future__ import annotations

import ast
import inspect
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import opweave.compile
from opweave import ir
from opweave.compile import compat, pipeline, tracing
from opweave.compile.graph import tensors_of
from opweave.compile.tracing import AtenTrace, inline
from opweave.ir.testing import isolated_registry

from .blocks import Model, OpCalls, model_inputs
from .conftest import all_native, compiled

aten = torch.ops.aten


def views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Views of arguments, of fresh tensors and of views; several results; other dtypes."""
    halves = x.split(2, dim=-1)
    fresh = x * y
    values, places = fresh[1:].sort(-1)
    bits = x.view(torch.int16)[:, 3:]
    return halves[1], fresh.t()[1], values.unsqueeze(0), places, bits, y.expand(2, *y.shape)


def fakes(dynamic: bool) -> list[Tensor]:
    """Two slices of one tensor, the second of which begins further in."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    base = torch.randn(9, 6)
    if dynamic:
        torch._dynamo.mark_dynamic(base, 0)
    fake = mode.from_tensor(base)
    with mode:
        return [fake[1:5], fake[5:9]]


def inlined(trace: AtenTrace, *given: list[Tensor]) -> list[Node]:
    """Inline a copy of *trace* for each list of arguments into a graph of those alone."""
    graph = Graph(GraphModule({}, Graph()))
    inputs = [[graph.placeholder("x") for _ in values] for values in given]
    end = graph.output(())
    for nodes, values in zip(inputs, given, strict=True):
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = value
        inline(graph, trace, end, nodes)
    return [node for node in graph.nodes if node is not end]


def looks(nodes: list[Node]) -> list[Any]:
    """Return what can be seen of fake values: everything but where in memory they are."""
    return [
        (t.dtype, t.device, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad)
        for node in nodes
        for t in tensors_of(node)
    ]


def sharing(nodes: list[Node]) -> list[bool]:
    """Return which pairs of fake values are in one storage."""
    keys = [compat.storage_key(t) for node in nodes for t in tensors_of(node)]
    return [a == b for a, b in product(keys, keys)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_moved_is_computed(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = fakes(dynamic)
    trace = AtenTrace(compat.trace(views, [compat.fresh_fake(t) for t in given]))
    assert trace.is_movable
    moved = inlined(trace, given, given)
    monkeypatch.setattr(tracing, "_move_fakes", tracing._compute_fakes)
    computed = inlined(trace, given, given)
    assert looks(moved) == looks(computed)
    assert sharing(moved) == sharing(computed)
    assert not {id(t) for n in moved for t in tensors_of(n)} & {
        id(t) for n in trace.info.nodes for t in tensors_of(n)
    }


def test_sizes_that_the_data_tell_are_computed() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first, second = (mode.from_tensor(torch.randn(4)) for _ in range(2))
    trace = AtenTrace(compat.trace(lambda x: x.nonzero(), [first]))
    assert not trace.is_movable
    copies = inlined(trace, [first], [second])
    found = [node for node in copies if node.target is aten.nonzero.default]
    sizes = [tensors_of(node)[0].shape[0] for node in found]
    assert len({str(size) for size in sizes}) == 2, "each copy has a size of its own"


def test_one_argument_twice_is_no_other_trace() -> None:
    """A trace for (x, x) must hold for (x, y): both have one signature."""
    with isolated_registry():

        @ir.register_op
        def minus(x: Tensor, other: Tensor) -> Tensor:
            return x * 2 - other

        def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return minus(a, a), minus(a, b), minus(b[1:], a[:-1])

        a, b = torch.randn(2, 3, 4)
        run = compiled(function)
        for found, wanted in zip(run(a, b), function(a, b), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("priorities", ["native", "kernels"])
def test_layers_cost_nothing_but_copies(priorities: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes trace as much, and run as many shape functions, for four layers as for two."""
    counts, traces, running = [], [], []
    dispatch, run = FakeTensorMode.dispatch, pipeline.run

    def counted(mode: FakeTensorMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        if running and function is not torch.ops.prim.device.default:  # what predicates ask for
            counts[-1] += 1
        return dispatch(mode, function, *args, **kwargs)

    def passes(*args: Any) -> None:
        running.append(True)
        run(*args)
        running.pop()

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    monkeypatch.setattr(pipeline, "run", passes)
    for layers in (2, 4):
        torch.compiler.reset()
        counts.append(0)
        model = Model(layers, OpCalls())
        forward = compiled(model)
        with ir.priority(all_native() if priorities == "native" else {}):
            forward(*model_inputs(8))
        report = opweave.compile.report()
        traces.append(report.traces)
        assert len(report.nodes) >= 5 * layers
    assert traces[0] == traces[1]
    assert counts[0] >= counts[1] > 0, "the second time, torch has some of them in a cache"


# Private names of torch: where they are used, and facts about them that no other test shows.

FOLDER = Path(inspect.getfile(compat)).parent


def test_storage_key() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 4)
        assert compat.storage_key(fake) == compat.storage_key(fake[1:].t())
        assert compat.storage_key(fake) != compat.storage_key(fake.clone())
        assert compat.storage_key(fake.to_sparse()) is None


def test_is_wrapped() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        same = compat.storage_key(x) == compat.storage_key(x[1:]) == compat.storage_key(base)
        seen.append((compat.is_wrapped(x), compat.is_wrapped(base), same))
        return x.sum()

    base = torch.zeros(2, 3)
    torch.vmap(torch.func.grad(look))(base)
    torch.func.grad(look)(base)
    assert seen == [(True, False, True)] * 2


def test_private_names_are_in_compat_only() -> None:
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name.endswith("compat.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
                found.append(f"{path.name}:{node.lineno} {node.module}")
    assert not found


def test_keep_mutation_order() -> None:
    from torch._inductor.scheduler import SchedulerNode

    compat.correct_mutations()
    corrected = SchedulerNode._compute_attrs
    compat.correct_mutations()
    assert SchedulerNode._compute_attrs is corrected, "corrected once"
    for name in ("mutation_renames", "set_read_writes"):
        assert name in inspect.getsource(SchedulerNode.__mro__[1]), name
