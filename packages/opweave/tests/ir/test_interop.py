"""The IR in torch's world: compile, export, fake tensors, transforms, gradients, modes, modules."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from ir.helpers import (
    assert_equal,
    calls,
    each_op,
    inputs,
    ir_nodes,
    on_tensors,
    op_of,
    overloads,
    tuple_of,
)
from opweave import ir, torch_compat
from opweave.ir.torch_ops import Function, opaque_op
from opweave.tuning import record_calls

# opcheck

OVERLOADS = [
    (name, which)
    for name in ("rms_norm", "fused_add_rms_norm")  # the conformance kit checks the others
    for which in overloads(op_of(name))
]


@pytest.mark.parametrize(("name", "which"), OVERLOADS)
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_opcheck(name: str, which: str, grad: bool) -> None:
    op = op_of(name)
    values = inputs(op, grad=grad)
    extra = {"using": "native", "donate": [0]} if which == "annotated" else {}
    torch.library.opcheck(overloads(op)[which], values, extra)


# Tracing


@each_op
def test_make_fx_sees_one_node(name: str) -> None:
    op = op_of(name)
    call, tensors = on_tensors(op, inputs(op))
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(call, tracing_mode=mode)(*tensors)
        targets = [t for t in calls(traced.graph) if "getitem" not in str(t)]
        assert targets == [op.torch_op], mode
        assert_equal(traced(*tensors), call(*tensors))


@each_op
def test_natives_are_traced_into(name: str) -> None:
    op = op_of(name)
    call, tensors = on_tensors(op.native, inputs(op))
    traced = make_fx(call)(*tensors)
    assert calls(traced.graph)
    assert ir_nodes(traced.graph, op) == 0
    assert_equal(traced(*tensors), call(*tensors))


@each_op
def test_symbolic_trace_sees_one_node(name: str) -> None:
    op = op_of(name)
    values = inputs(op)
    call, tensors = on_tensors(op, values)
    names = ", ".join(f"t{i}" for i in range(len(tensors)))  # fx wants named parameters
    traced = torch.fx.symbolic_trace(eval(f"lambda {names}: call({names})", {"call": call}))
    assert [t for t in calls(traced.graph) if "getitem" not in str(t)] == [op.torch_op]
    assert_equal(traced(*tensors), op(*values))


@each_op
def test_maybe_inplace_is_traced_as_itself(name: str) -> None:
    op = op_of(name)
    if not op.allow_inplace:
        return
    call, tensors = on_tensors(op.maybe_inplace, inputs(op))
    traced = make_fx(call)(*tensors)
    assert ir_nodes(traced.graph, op) == 1
    assert any(n.target is op.torch_ops.maybe_inplace for n in traced.graph.nodes)


@pytest.mark.parametrize("strict", [True, False])
@each_op
def test_export_keeps_one_node(name: str, strict: bool) -> None:
    op = op_of(name)
    call, tensors = on_tensors(op, inputs(op))

    class Module(torch.nn.Module):
        def forward(self, tensors: list[Tensor]) -> Any:
            return call(*tensors)

    program = torch.export.export(Module(), (tensors,), strict=strict)
    assert ir_nodes(program.graph, op) == 1
    assert_equal(program.module()(tensors), call(*tensors))


# Compilation


@each_op
def test_compiled_values_equal_eager_ones(name: str) -> None:
    op = op_of(name)
    call, tensors = on_tensors(op, inputs(op))
    expected = call(*tensors)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(*tensors), expected)


def test_a_new_batch_size_does_not_recompile() -> None:
    torch.compiler.reset()
    compiles = 0

    def backend(module: torch.fx.GraphModule, example: list[Any]) -> Any:
        nonlocal compiles
        compiles += 1
        assert ir_nodes(module.graph, ir.ops.rms_norm) == 1
        return module.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return ir.ops.rms_norm(x * 2, weight, 1e-6) + 1

    weight = torch.randn(16)
    for tokens in (2, 5, 33, 4):
        x = torch.randn(tokens, 16)
        assert_equal(block(x, weight), ir.ops.rms_norm(x * 2, weight, 1e-6) + 1)
    assert compiles == 1


def test_a_compiled_call_keeps_its_own_priority() -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(module.graph)
        return module.forward

    x, w = torch.randn(3, 8), torch.randn(8)

    @torch.compile(backend=backend, fullgraph=True)
    def block(x: Tensor) -> tuple[Tensor, ...]:
        a = ir.ops.rms_norm.using("batch_invariant")(x, w, 1e-6)
        b = ir.ops.rms_norm.using("aten!", "native")(x, weight=w, epsilon=1e-6)
        c, d = ir.ops.fused_add_rms_norm.using("native").maybe_inplace(x * 1, x * 2, w, 1e-6)
        return a, b, c, d

    torch.compiler.reset()
    with ir.record() as log, torch.no_grad():
        block(x)
    (graph,) = graphs
    using = [n.kwargs["using"] for n in graph.nodes if "using" in n.kwargs]
    assert using == ["batch_invariant", "aten!,native", "native"]
    donate = [list(n.kwargs.get("donate", [])) for n in graph.nodes if "using" in n.kwargs]
    assert donate == [[], [], [0, 1]]
    assert log.selected_impls["rms_norm"].keys() >= {"batch_invariant", "aten"}
    assert log.selected_impls["fused_add_rms_norm"] == {"native": 1}


def test_a_scope_around_compiled_code_counts_when_it_runs() -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    torch.compiler.reset()
    block = torch.compile(lambda x: ir.ops.rms_norm(x, w, 1e-6), backend="eager", fullgraph=True)
    for provider in ("native", "batch_invariant", "aten", "native"):
        with ir.priority(rms_norm=[provider]), ir.record() as log, torch.no_grad():
            block(x)
        assert log.selected_impls == {"rms_norm": {provider: 1}}


@pytest.mark.parametrize("provider", ir.ops.rms_norm.supported_providers())
def test_gradients_through_compiled_code(provider: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    w = torch.randn(8, requires_grad=True)
    torch.compiler.reset()
    block = torch.compile(
        lambda x, w: ir.ops.rms_norm(x, w, 1e-6).square().sum(), backend="aot_eager", fullgraph=True
    )
    expected = torch.autograd.grad(ir.ops.rms_norm.native(x, w, 1e-6).square().sum(), (x, w))
    with ir.priority(rms_norm=[provider]):
        found = torch.autograd.grad(block(x, w), (x, w))
    torch.testing.assert_close(found, expected)


# Fake and meta tensors


@each_op
def test_fake_tensors_lead_to_the_same_choice(name: str) -> None:
    op = op_of(name)
    for values in (inputs(op), inputs(op, dtype=torch.bfloat16)):
        with torch.no_grad(), FakeTensorMode() as mode:
            faked = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in values]
            assert ir.explain(op, *faked).chosen == ir.explain(op, *values).chosen
            assert all(type(t).__name__ == "FakeTensor" for t in tuple_of(op(*faked)))


@each_op
def test_meta_tensors(name: str) -> None:
    op = op_of(name)
    values = inputs(op)
    metas = [v.to("meta") if isinstance(v, Tensor) else v for v in values]
    for m, r in zip(tuple_of(op.torch_op(*metas)), tuple_of(op(*values)), strict=True):
        assert (m.shape, m.dtype) == (r.shape, r.dtype)


# Opaque ops: one node of a graph, differentiable, and there as long as the process.


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


def test_values_of_an_opaque_op(op: Function) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(op(x), x.sin() * 2)
    assert torch.equal(op(x, factor=3.0), x.sin() * 3)
    with torch.inference_mode():
        assert torch.equal(op(x, 3.0), x.sin() * 3)


@pytest.mark.parametrize("keyword", [False, True])
def test_gradients_of_an_opaque_op(op: Function, keyword: bool) -> None:
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


def test_opcheck_of_an_opaque_op(op: Function) -> None:
    x = torch.randn(3, 4)
    torch.library.opcheck(op, (x, 0.5), test_utils=("test_schema", "test_faketensor"))


# FlopCounterMode, and direct calls of the torch op.


def flops(function: Callable[..., Any], *args: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "linear_w8a8", "linear_w4a16", "fused_experts", "causal_attention"),
        *("bidirectional_attention", "varlen_attention", "paged_attention", "conv_nd"),
        *("mla_attention_decode", "ssd_chunk_scan"),
    ],
)
def test_flops_are_those_of_the_definition(name: str) -> None:
    op = getattr(ir.ops, name)
    values = op.bind(*op.generate_inputs())
    expected = flops(op.native, *values)
    assert expected > 0
    assert flops(op, *values) == flops(op.using("native"), *values) == expected


def test_flops_are_counted_if_the_counter_is_imported_after_the_ops() -> None:
    code = (
        "import sys, torch; from opweave import ir; op = ir.ops.linear;"
        "assert 'torch.utils.flop_counter' not in sys.modules;"
        "from torch.utils.flop_counter import FlopCounterMode as Mode, flop_registry;"
        "mode = Mode(display=False); mode.__enter__();"
        "op(torch.ones(3, 8), torch.ones(5, 8)); print(mode.get_total_flops())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(2 * 3 * 5 * 8)


def test_flops_of_a_product() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert flops(ir.ops.linear, x, weight) == 2 * 3 * 5 * 8
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(x), mode.from_tensor(weight)
        assert flops(ir.ops.linear, *fakes) == 2 * 3 * 5 * 8
    assert flops(ir.ops.silu_and_mul, x) == 0


def test_a_plain_call_of_the_torch_op_is_dispatched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched = []
    below = torch_compat.below_autograd

    def counted() -> AbstractContextManager[None]:
        dispatched.append(1)
        return below()

    monkeypatch.setattr(torch_compat, "below_autograd", counted)
    op, x = ir.ops.silu_and_mul, torch.randn(3, 8)
    op.torch_op(x)  # generates its function
    dispatched.clear()
    assert torch.equal(op.torch_op(x), op(x))
    assert not dispatched
    with FlopCounterMode(display=False):  # a mode must see the call
        op.torch_op(x)
    assert dispatched
    x.requires_grad_()
    assert op.torch_op(x).requires_grad
    with ir.priority(silu_and_mul=["native"]), record_calls() as recorder:
        op.torch_op(x.detach())
    assert [call.provider for call in recorder.trace.calls] == ["native"]
