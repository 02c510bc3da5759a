"""Compiler passes, compile backends, I/O processors and stat loggers of other packages."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from opweave import ir
from opweave.compile import CompiledGraph, PluginPassError, backend
from opweave.compile.graph import ir_calls, replace
from opweave.compile.options import CompileOptions
from opweave.compile.pipeline import Stage, steps
from opweave.compile.plan import Context, Plan, plugin_passes
from opweave.config import CompilationConfig, EngineConfig
from opweave.config.values import DuplicateNameError
from opweave.platforms import register_pass
from opweave.platforms.resolution import registered_passes
from opweave.plugins.entry import ReferenceNameError
from opweave.registration import Owner, owned_by
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.runner import check_backend, compiled_forward
from support.fixtures import FreshCases

from .conftest import Acme, installed

OWNER = Owner("extra", "acme-extra", "2.0")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that references can name, ``acme_seams``, and no pass of anybody else's."""
    monkeypatch.setattr(registered_passes, "_entries", {})
    made: Any = ModuleType("acme_seams")
    made.drop_relu, made.broken, made.nothing = drop_relu, broken, 3
    monkeypatch.setitem(sys.modules, "acme_seams", made)
    return made


def drop_relu(graph: Graph, context: Context) -> None:
    """Replace relu2 by the square of its input: values show whether the pass ran."""
    for call in ir_calls(graph):
        if call.op.name == "relu2":
            with graph.inserting_before(call.node):
                unused = graph.call_function(torch.ops.aten.neg.default, (call.values[0],))
                square = graph.call_function(torch.ops.aten.mul.Tensor, (call.values[0],) * 2)
            replace(call, [square])
            context.notes.append(f"{call.node.name} squared, {unused.name} left")


def broken(graph: Graph, context: Context) -> None:
    raise ZeroDivisionError("no such fusion")


class WithPass(Acme):
    def extra_passes(self, config: EngineConfig | None) -> Sequence[str]:
        return ["acme_seams:drop_relu"]


@pytest.fixture
def with_pass(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("opweave.platforms.current_platform", WithPass())
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def squares(x: Tensor) -> Tensor:
    result: Tensor = ir.ops.relu2(x)
    return result


def graphs(function: Any, x: Tensor, **options: Any) -> tuple[Tensor, list[CompiledGraph]]:
    """Compile without code generation; return the result and what the backend made."""
    made: list[CompiledGraph] = []

    def capture(graph_module: Any, inputs: Any) -> Any:
        made.append(backend(graph_module, inputs, options={"codegen": False, **options}))
        return made[-1]

    return torch.compile(function, backend=capture)(x), made


# Compiler passes


@pytest.mark.usefixtures("with_pass")
def test_a_platforms_pass_runs_and_is_reported() -> None:
    x = torch.randn(3, 8)
    found, (graph,) = graphs(squares, x)
    assert torch.equal(found, x * x)
    (record,) = [r for r in graph.log.reports[0].passes if r.name == "acme_seams:drop_relu"]
    assert record.stage == Stage.JOINT.value
    assert record.changed
    assert "squared" in record.notes[0]
    assert record.notes[1:] == ["1 unused nodes"]
    assert "neg" not in record.after


@pytest.mark.usefixtures("with_pass")
def test_passes_can_be_turned_off() -> None:
    x = torch.randn(3, 8)
    found, _ = graphs(squares, x, plugin_passes=False)
    assert torch.equal(found, squares(x))


@pytest.mark.usefixtures("with_pass")
def test_they_run_before_ops_are_lowered_and_are_in_the_key(module: Any) -> None:
    with owned_by(OWNER):
        register_pass("acme_seams.broken")
    registry = ir.current_registry()
    with_both = Plan.capture([registry], CompileOptions())
    names = [step.name for step in steps(Stage.JOINT, with_both)]
    first = names.index("acme_seams.broken")
    assert names[first : first + 3] == [
        "acme_seams.broken",
        "acme_seams:drop_relu",
        "lower functional",
    ]
    assert [step.owner for step in steps(Stage.JOINT, with_both)][first] == str(OWNER)
    for stage in (Stage.DYNAMO, Stage.POST_GRAD):
        assert not any("acme" in step.name for step in steps(stage, with_both))
    without = Plan.capture([registry], CompileOptions(plugin_passes=False))
    changed = dataclasses.replace(with_both, passes=with_both.passes[1:])
    module.broken = drop_relu
    other = Plan.capture([registry], CompileOptions())
    assert len({plan.digest for plan in (with_both, without, changed, other)}) == 4


def test_a_pass_that_fails_names_itself_and_its_owner(module: ModuleType) -> None:
    with owned_by(OWNER):
        register_pass("acme_seams.broken")
    with pytest.raises(Exception, match="no such fusion") as raised:
        graphs(squares, torch.randn(2, 4))
    for part in ("acme_seams.broken", "extra (acme-extra 2.0)", "plugin_passes=False"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("acme_seams.nothing", "is 3; it should be a function"),
        ("acme_seams.Graph", r"extra \(acme-extra 2.0\) does not exist: .* has no 'Graph'"),
        ("no_module_of_this_name.x", "no module 'no_module_of_this_name'.*plugin_passes=False"),
    ],
)
def test_a_pass_that_is_none(name: str, named: str, module: ModuleType) -> None:
    with owned_by(OWNER):
        register_pass(name)
    with pytest.raises(PluginPassError, match=named):
        plugin_passes()


@pytest.mark.parametrize("name", ["", "acme", "acme seams.x", drop_relu, 3])
def test_a_name_that_is_none(name: Any, module: ModuleType) -> None:
    with pytest.raises(ReferenceNameError, match="is not a qualified name"):
        register_pass(name)


def last(graph: Graph) -> Node:
    return next(reversed(graph.nodes))


def drop_output(graph: Graph, _: Context) -> None:
    graph.erase_node(last(graph))


def add_input(graph: Graph, _: Context) -> None:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("another")


def add_result(graph: Graph, _: Context) -> None:
    (results,) = last(graph).args
    last(graph).args = ((*cast("tuple[Node, ...]", results), None),)


def break_call(graph: Graph, _: Context) -> None:
    ir_calls(graph)[0].node.args = ()


def break_value(graph: Graph, _: Context) -> None:
    next(iter(graph.nodes)).meta["val"] = "none"


def leave(graph: Graph, _: Context) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (drop_output, "changed the output nodes of the graph from 1 to 0"),
        (add_input, "changed the inputs of the graph"),
        (add_result, "changed the outputs of the graph from 1 to 2"),
        (break_call, "TypeError: relu2.* missing 1 required"),
        (break_value, "is a str"),
        (leave, "SystemExit: 3"),
    ],
)
def test_a_pass_that_breaks_the_graph(step: Any, named: str, module: Any) -> None:
    module.breaking = step
    with owned_by(OWNER):
        register_pass("acme_seams.breaking")
    with pytest.raises(Exception, match=named) as raised:
        graphs(squares, torch.randn(2, 4))
    for part in ("PluginPassError", "acme_seams.breaking", "extra (acme-extra 2.0)"):
        assert part in str(raised.value)


def test_a_pass_is_registered_once(module: ModuleType) -> None:
    register_pass("acme_seams.broken")
    with pytest.raises(DuplicateNameError, match=r"compiler pass 'acme_seams\.broken'"):
        register_pass("acme_seams.broken")


# The compile backend


def test_a_backend_may_be_a_function_by_reference(module: Any) -> None:
    def compile_(graph_module: Any, inputs: Any) -> Any:
        return lambda *args: [out + 1 for out in graph_module(*args)]

    class Twice(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return 2 * x + positions

    module.compile = compile_
    config = CompilationConfig("acme_seams:compile", mode=2)
    check_backend(config)
    x = torch.ones(4)
    assert torch.equal(compiled_forward(Twice(), config)(x, x), 3 * x + 1)
    torch.compiler.reset()


def test_backends_that_do_not_exist(module: ModuleType) -> None:
    with pytest.raises(ReferenceNameError, match="has no 'compyle'"):
        check_backend(CompilationConfig("acme_seams:compyle", mode=2))
    with pytest.raises(InvalidArgumentError, match="indcutor"):
        check_backend(CompilationConfig("indcutor", mode=2))


# Plugins of the engine

SEAMS = """
    from opweave_engine.prompts import IOProcessor
    from opweave_engine.metrics import StatLogger

    class Words(IOProcessor):
        def prompts(self, request):
            return request["words"]

        def result(self, request, outputs):
            return " ".join(outputs)

    class Prints(StatLogger):
        def record(self, stats):
            print(stats)

    calls = []

    def words():
        calls.append("words")
        return "acme_seams.Words"

    def wrong():
        return "acme_seams.Prints"
"""


def test_io_processors_and_stat_loggers(fresh_cases: FreshCases) -> None:
    good = """
        from opweave.config import EngineConfig
        from opweave_engine.prompts import io_processor
        from opweave_engine.metrics import stat_loggers
        from opweave.plugins.entry import PluginTypeError, UnknownPluginError

        config = EngineConfig(seed=3)
        for _ in range(2):
            words = io_processor("words", config)
        assert words.config is config and words.prompts({"words": ["a", "b"]}) == ["a", "b"]
        import acme_seams
        assert acme_seams.calls == ["words"]
        for name, error, named in (("wrods", UnknownPluginError, "'words'?"),
                                   ("wrong", PluginTypeError, "derived from")):
            try:
                io_processor(name, config)
            except error as raised:
                assert named in str(raised), raised
            else:
                raise AssertionError
        (prints,) = stat_loggers(config)
        assert type(prints) is acme_seams.Prints and prints.config is config
    """
    bad = """
        from opweave.config import EngineConfig
        from opweave_engine.metrics import stat_loggers
        try:
            stat_loggers(EngineConfig())
        except TypeError as error:
            assert "'prints'" in str(error) and "OPWEAVE_PLUGINS=-prints" in str(error), error
        else:
            raise AssertionError
    """
    io = {"words": "acme_seams:words", "wrong": "acme_seams:wrong"}
    points = {
        "opweave.io_processor_plugins": io,
        "opweave.stat_logger_plugins": {"prints": "acme_seams:Prints"},
    }
    wrong = {"opweave.stat_logger_plugins": {"prints": "acme_seams:words"}}
    files = {"acme_seams.py": SEAMS}
    fresh_cases([installed(good, points, files), installed(bad, wrong, files)])
