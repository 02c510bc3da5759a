"""The ways in: the backend by name, plain torch.compile, other compilers, export."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import opweave.compile
from opweave import ir, native
from opweave.compile import CompileError, Report, UnloweredOpError, pipeline
from opweave.compile.backend import ReportLog
from opweave.compile.graph import all_graphs, graph_text, ir_calls
from opweave.ir import rules

from .blocks import SHIPPED, Model, OpCalls, model_inputs
from .conftest import compiled

W = torch.ones(8)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y, r = ir.ops.fused_add_rms_norm(x * 2, r, self.weight, 1e-5)
        return ir.ops.silu_and_mul(y), r


@pytest.fixture
def installed() -> Iterator[None]:
    opweave.compile.install()
    yield
    opweave.compile.uninstall()


def test_install_gives_plain_torch_compile_the_passes(installed: None) -> None:
    model, inputs = Small(), (torch.randn(4, 8), torch.randn(4, 8))
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    first = opweave.compile.report()
    assert {node.chosen for node in first.nodes} == {"opweave_c"}
    with ir.priority(silu_and_mul="native"):
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert "native" in {node.chosen for node in opweave.compile.report().nodes}
    opweave.compile.uninstall()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(*inputs), model(*inputs))


def test_one_graph_for_every_number_of_tokens() -> None:
    model = Model(2, OpCalls())
    run = compiled(model, dynamic=True)
    model(*model_inputs(2))  # it looks its ops up when it is first called
    counter = torch._dynamo.utils.counters
    counter.clear()
    for tokens in (2, 7, 64, 500):
        inputs = model_inputs(tokens)
        torch.testing.assert_close(run(*inputs), model(*inputs), atol=1e-3, rtol=1e-3)
    assert counter["stats"]["unique_graphs"] == 1
    run(*model_inputs(1))
    assert counter["stats"]["unique_graphs"] <= 2


def halved(x: Tensor) -> Tensor:
    return torch.vmap(lambda t: ir.ops.silu_and_mul(t[:, :4]) + t[:, 4:6])(x)


def derived(x: Tensor) -> Tensor:
    grad = torch.func.grad(lambda t: ir.ops.rms_norm(t, W, 1e-6).square().sum())
    found: Tensor = grad(x)
    return found


@pytest.mark.parametrize(("function", "codegen"), [(halved, True), (derived, False)])
def test_transforms(function: Callable[[Tensor], Tensor], codegen: bool) -> None:
    run = compiled(function, codegen=codegen)
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(run(x), function(x))


def test_an_op_is_first_used_in_a_transform(fresh_python: Any) -> None:
    done = fresh_python("""
        import torch
        import opweave.compile
        from opweave import ir, native
        from opweave.ir import codegen

        def halved(x):
            return torch.vmap(lambda t: ir.ops.silu_and_mul(t))(x)

        x = torch.randn(3, 4, 8)
        found = torch.compile(halved, backend="opweave")(x)
        torch.testing.assert_close(found, halved(x))
        print(codegen._plain_check is not None or native.module() is None)
    """)
    assert done.stdout == "True\n", done.stderr


def test_a_kernel_that_cannot_be_traced_stays_a_call() -> None:
    with ir.isolated_registry():

        @ir.register_op
        def both(x: Tensor, by: int = 2, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
            return x * by + shift, x * 2

        @both.register_impl("opaque")
        def _(x: Tensor, by: int = 2, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
            if type(x) is not Tensor:
                raise RuntimeError("this kernel looks at pointers")
            return x * by + shift, x * 2

        both.set_default(["opaque"])

        def program(x: Tensor) -> list[Tensor]:
            return [both(x.sin(), **o)[0] + 1 for o in ({}, {"by": 3}, {"shift": 1.0})]

        x = torch.randn(3, 4)
        with ir.priority(both="native"):
            expected = program(x)
        run = torch.compile(program, backend=opweave.compile.backend, fullgraph=True)
        torch.testing.assert_close(run(x), expected)
        for node in opweave.compile.report().nodes:
            assert node.chosen == "opaque"
            assert "this kernel looks at pointers" in node.stage


WRONG = {
    "three": lambda x: (x, x, x),
    "number": lambda x: 5,
    "dtype": lambda x: x.double() + 1,
    "dimensions": lambda x: x.unsqueeze(0) + 1,
    "sizes": lambda x: x[:1] + 1,
}


@pytest.mark.parametrize(("dynamic", "inplace"), [(False, True), (True, False)])
@pytest.mark.parametrize("wrong", WRONG)
def test_outputs_that_the_op_does_not_have(wrong: str, dynamic: bool, inplace: bool) -> None:
    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True)
        def plus(x: Tensor) -> Tensor:
            return x + 1

        plus.register_impl(wrong, inplace=inplace)(WRONG[wrong])
        plus.set_default([wrong])
        named = rf"plus: the implementation '{wrong}' .* returns \(.*\), but the op's definition"
        with pytest.raises(Exception, match=named):
            compiled(lambda x: plus(x * 2), dynamic=dynamic)(torch.ones(3))


def test_an_implementation_that_calls_its_own_op() -> None:
    with ir.isolated_registry():

        @ir.register_op
        def endless(x: Tensor) -> Tensor:
            return x + 1

        endless.register_impl("circle")(lambda x: endless(x.contiguous()))
        endless.set_default(["circle"])
        with pytest.raises(Exception, match=r"call each other, 16 deep .*: 'circle' of endless"):
            compiled(endless)(torch.ones(3))


UNBACKED = {
    "fused_add_rms_norm": lambda x: ir.ops.fused_add_rms_norm(x * 1, x * 2, None, 1e-6)[0],
    "rms_norm": lambda x: ir.ops.rms_norm(x, None, 1e-6),
    "silu_and_mul": ir.ops.silu_and_mul,
    "linear": lambda x: ir.ops.linear(x, torch.ones(4, 8), None),
    "static_quant_fp8": lambda x: ir.ops.static_quant_fp8(x, torch.tensor([0.05])),
}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_the_data_tells() -> None:
    def step(x: Tensor, mask: Tensor) -> list[Tensor]:
        return [function(x[mask]).float() for function in UNBACKED.values()]

    run = torch.compile(step, backend=opweave.compile.backend, fullgraph=True)
    for rows in (4, 2, 1):
        x, mask = torch.randn(4, 8), torch.arange(4) < rows
        torch.testing.assert_close(run(x, mask), step(x, mask))
    ran = {node.op: node.chosen for node in opweave.compile.report().nodes}
    assert ran == dict.fromkeys(UNBACKED, "opweave_c" if native.available() else "native")


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_rule_of_a_size_that_only_the_data_tells() -> None:
    with ir.isolated_registry():

        @ir.register_op
        def plus(x: Tensor) -> Tensor:
            return x + 1

        plus.register_impl("even", supports_args=rules.last_dim_multiple_of("x", 2))(plus.native)
        plus.set_default(["even"])
        run = compiled(lambda x, mask: plus(x[mask]))
        x = torch.arange(4.0)
        assert run(x, x > 1).tolist() == [3, 4]
        (node,) = opweave.compile.report().nodes
    assert node.chosen == "native"
    assert "reads a data-dependent size" in str(node)


def test_lower_for_another_backend() -> None:
    seen: list[torch.fx.GraphModule] = []

    def other(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        report = Report()
        lowered = opweave.compile.lower(graph_module, inputs, report=report)
        assert ir_calls(graph_module.graph), "the graph that was given is as it was"
        assert not ir_calls(lowered.graph)
        assert len(report.nodes) == 2
        seen.append(lowered)
        return lowered.forward

    model, inputs = Small(), (torch.randn(4, 8), torch.randn(4, 8))
    found = torch.compile(model, backend=other, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, model(*inputs))
    assert len(seen) == 1


def calling_silu(x: Tensor) -> Tensor:
    return torch.ops.opweave.silu_and_mul(x)


def test_lower_needs_to_know_the_inputs() -> None:
    graph_module = torch.fx.symbolic_trace(calling_silu)
    with pytest.raises(CompileError, match="pass example_inputs"):
        opweave.compile.lower(graph_module)
    lowered = opweave.compile.lower(graph_module, [torch.randn(2, 8)])
    x = torch.randn(2, 8)
    torch.testing.assert_close(lowered(x), ir.ops.silu_and_mul(x))


def test_an_exported_program_is_lowered() -> None:
    model, inputs = Small(), (torch.randn(4, 8), torch.randn(4, 8))
    dynamic = {"x": {0: torch.export.Dim("tokens")}, "r": {0: torch.export.Dim("tokens")}}
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    lowered = opweave.compile.lower(program.module())
    for tokens in (4, 9):
        given = torch.randn(tokens, 8), torch.randn(tokens, 8)
        torch.testing.assert_close(lowered(*given), model(*given))


class Branches(nn.Module):
    """Calls an op at each depth: outside control flow, in a branch, in a nested branch."""

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        def added(x: Tensor, r: Tensor) -> Tensor:
            return ir.ops.rms_norm(x + r, None, 1e-5)

        def gated(x: Tensor, r: Tensor) -> Tensor:
            return ir.ops.silu_and_mul(torch.cat((x, r), -1))

        def branches(x: Tensor, r: Tensor) -> Tensor:
            return torch.cond(x.mean() > 1, added, gated, (x, r))

        return torch.cond(x.sum() > 0, branches, gated, (x, r)), ir.ops.silu_and_mul(x)


DEPTHS = {"fused_add_rms_norm": 1, "silu_and_mul": 3}


def given_to_branches() -> list[tuple[Tensor, Tensor]]:
    x, r = torch.rand(4, 8) + 0.1, torch.randn(4, 8)
    return [(x, r), (x + 1, r), (-x, r)]


def test_control_flow_is_lowered() -> None:
    module = torch.export.export(Branches(), given_to_branches()[0]).graph_module
    before = [graph_text(each.graph) for each in all_graphs(module)]
    report = Report()
    lowered = opweave.compile.lower(module, report=report)
    assert Counter(node.op for node in report.nodes) == DEPTHS
    assert len(all_graphs(lowered)) == len(before) == 5
    assert not any(ir_calls(each.graph) for each in all_graphs(lowered))
    assert [graph_text(each.graph) for each in all_graphs(module)] == before
    for given in given_to_branches():
        torch.testing.assert_close(tuple(lowered(*given)), Branches()(*given))


def test_control_flow_runs_what_the_passes_leave() -> None:
    run = compiled(Branches())
    for given in given_to_branches():
        torch.testing.assert_close(run(*given), Branches()(*given))
    assert Counter(node.op for node in opweave.compile.report().nodes) == DEPTHS


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its tree specs
@pytest.mark.slow
def test_a_package_of_aot_inductor_loads_where_only_opweave_is_imported(
    installed: None, tmp_path: Path, fresh_python: Any
) -> None:
    model, inputs = Small(), (torch.randn(4, 8), torch.randn(4, 8))
    package, expected = str(tmp_path / "small.pt2"), str(tmp_path / "expected.pt")
    with ir.priority(silu_and_mul="batch_invariant"):
        torch.save((inputs, model(*inputs)), expected)
        torch._inductor.aoti_compile_and_package(
            torch.export.export(model, inputs), package_path=package
        )
    chosen = {node.op: node.chosen for node in opweave.compile.report().nodes}
    assert chosen == {"fused_add_rms_norm": "opweave_c", "silu_and_mul": "batch_invariant"}
    fresh_python(
        f"""
        import sys
        import torch
        import opweave

        assert not [name for name in sys.modules if name.startswith("opweave.kernels")]
        inputs, expected = torch.load({expected!r})
        found = torch._inductor.aoti_load_package({package!r})(*inputs)
        torch.testing.assert_close(tuple(found), tuple(expected))
        """,
        warm=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_aot_inductor_without_the_passes_runs_a_call_site(tmp_path: Path) -> None:
    class Pinned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ir.ops.silu_and_mul.using("native")(x) + 1

    model, x = Pinned(), torch.randn(4, 8)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (x,)), package_path=str(tmp_path / "pinned.pt2")
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x))


def test_an_op_that_would_reach_codegen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = tuple(p for p in pipeline.PASSES if not p.name.startswith("lower"))
    monkeypatch.setattr(pipeline, "PASSES", passes)
    run = compiled(Small())
    with pytest.raises(Exception, match="would have reached code generation") as caught:
        run(torch.randn(4, 8), torch.randn(4, 8))
    assert UnloweredOpError.__name__ in repr(caught.value) or caught.value


def test_passes_change_nothing_when_they_run_twice() -> None:
    """Every stage is idempotent."""
    graphs: list[str] = []
    original = pipeline.run

    def twice(stage: Any, graph: torch.fx.Graph, context: Any) -> None:
        original(stage, graph, context)
        first = graph_text(graph)
        count = len(context.report.nodes)
        original(stage, graph, context)
        assert graph_text(graph) == first
        assert len(context.report.nodes) == count
        graphs.append(first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", twice)
        model = SHIPPED["quantized"]()
        both = torch.stack([torch.randint(0, 99, (8,)), torch.arange(8)])
        torch.testing.assert_close(compiled(model)(both), model(both), atol=0.2, rtol=0.2)
    assert len(graphs) == 3


def test_graphs_in_the_report_run() -> None:
    """The graphs before and after in a report are valid Python."""
    model = Model(1, OpCalls())
    run = compiled(model)
    run(*model_inputs(4))
    shown = [p for p in opweave.compile.report().passes if p.changed]
    assert {p.name for p in shown} >= {"carry donations", "lower in place"}
    for record in shown:
        for text in (record.before, record.after):
            names: dict[str, Any] = {"torch": torch, "device": torch.device}
            exec(compile(text, "<graph>", "exec"), names)
            assert callable(names["forward"])


def test_a_report_before_anything_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["opweave.compile.backend"]
    monkeypatch.setattr(module, "_latest", ReportLog())
    with pytest.raises(LookupError, match="nothing was compiled"):
        opweave.compile.report()


@pytest.mark.parametrize("calls_ops", [False, True], ids=["recognized", "ops"])
def test_forward_mode_derivatives(calls_ops: bool) -> None:
    weight, x, tangent = torch.randn(32, 64), torch.randn(5, 64), torch.randn(5, 64)

    def program(x: Tensor) -> Tensor:
        linear = ir.ops.linear if calls_ops else torch.nn.functional.linear
        return linear(x, weight)

    run = compiled(program)
    for _ in range(2):
        torch.testing.assert_close(run(x), x @ weight.T)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent)))
            torch.testing.assert_close(found.primal, x @ weight.T)
            assert found.tangent is not None
            torch.testing.assert_close(found.tangent, tangent @ weight.T)
