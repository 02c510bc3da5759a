"""A graph that Dynamo traced, compiled for the priorities that hold when it is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from opweave.compile import compat, pipeline, precompiled, store
from opweave.compile.aliases import note_writes, overlaps_another
from opweave.compile.context import Context
from opweave.compile.inductor import hooks
from opweave.compile.log import logger
from opweave.compile.nodes import all_graphs, ir_calls, named_graphs
from opweave.compile.options import CompileOptions
from opweave.compile.passes.donation import donated_inputs
from opweave.compile.pipeline import Stage
from opweave.compile.plan import Plan
from opweave.compile.report import Report
from opweave.ir import Registry, current_registry
from opweave.ir.scope import Scope, current_scope

Runner = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any], dict[str, Any]], Runner]
Moment = tuple[Scope | None, tuple[int, ...], int | None]


class CompiledGraph(compat.SerializableCallable):
    """What the backend returns: a callable that never runs a selection that is out of date.

    The graph is compiled at once for what holds now. A call under other priorities or required
    traits (a scope, a changed default, a new implementation), or with a size in another compile
    range, runs the graph compiled for those, which is compiled when it is first needed.

    Args:
        graph_module: the graph; kept as it is.
        example_inputs: what Dynamo gave: fake or real tensors, symbolic or real numbers.
        options: of the backend.
        compile: Inductor.

    Attributes:
        options: as given.
        log: the reports of the graphs that were compiled.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        options: CompileOptions,
        compile: Compile = compat.compile_fx,
    ) -> None:
        self.options, self._compile = options, compile
        self._ranges = options.ranges
        self._registries = registries_of(graph_module)
        prepare_ops(graph_module)
        self._pristine = copy_module(graph_module)
        self._size_at = varying_size(example_inputs) if options.compile_ranges else None
        self._donated = donated_inputs(graph_module.graph)
        self._lock = threading.RLock()
        self._variants: dict[str, tuple[Runner, Report]] = {}  # by digest of the plan
        self.log = ReportLog()
        self._plans: dict[Any, str] = {}  # digests, by what holds
        plan = Plan.capture(self._registries, options, self._size(example_inputs))
        self._variants[plan.digest] = self._first(graph_module, example_inputs, plan)
        run, self.log.last = self._variants[plan.digest]
        # In one piece: threads must not see one half of it with the other half of another.
        self._current = self._moment(example_inputs), run
        remember(self.log)

    def __call__(self, *inputs: Any) -> Any:
        moment, run = self._current
        if self._donated:
            if overlaps_another(inputs, self._donated):
                return self._run_op_by_op(inputs)
            note_writes(inputs, self._donated)
        if not self._holds(moment, inputs):
            return self._call_variant(inputs)
        return run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: CompiledGraph) -> bytes:
        """Return the graph that was compiled at once as bytes, for ``aot_compile``."""
        run, report = next(iter(fn._variants.values()))
        return precompiled.to_bytes(run, report, fn._donated)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Callable[..., Any]:
        """Return the graph in *data*, which keeps the kernels that it was compiled with."""
        loaded = precompiled.Precompiled.from_bytes(data)
        remember(ReportLog([loaded.report], loaded.report))
        return loaded

    def _holds(self, moment: Moment, inputs: Sequence[Any]) -> bool:
        scope, versions, size = moment
        return (
            current_scope() is scope
            and self._registries[0].version == versions[0]
            and (len(versions) == 1 or tuple(r.version for r in self._registries) == versions)
            and (self._size_at is None or self._in_range(size, inputs))
        )

    def _moment(self, inputs: Sequence[Any]) -> Moment:
        versions = tuple(registry.version for registry in self._registries)
        return current_scope(), versions, self._size(inputs)

    def _call_variant(self, inputs: Sequence[Any]) -> Any:
        """Call the graph compiled for what holds now."""
        moment = self._moment(inputs)
        with self._lock:
            key = (_content(moment[0]), moment[1], self._range(moment[2]))
            if key not in self._plans:
                plan = Plan.capture(self._registries, self.options, moment[2])
                if plan.digest not in self._variants:
                    logger.debug("recompiling: priorities, traits or sizes have changed")
                    return self._call_another(plan, inputs)
                self._plans[key] = plan.digest
            run, self.log.last = self._variants[self._plans[key]]
            if moment[0] is None:  # scopes come and go
                self._current = moment, run
        return run(*inputs)

    def _first(
        self, graph_module: GraphModule, inputs: Sequence[Any], plan: Plan
    ) -> tuple[Runner, Report]:
        context = self._context(plan)
        return compile_with(graph_module, inputs, context, self._compile), context.report

    def _context(self, plan: Plan) -> Context:
        context = Context(plan)
        self.log.reports.append(context.report)
        return context

    def _call_another(self, plan: Plan, inputs: Sequence[Any]) -> Any:
        """Call the same graph compiled for another plan: through Dynamo, which guards its shapes.

        The call itself compiles it, so that the graph runs once. Where Dynamo is told to compile
        nothing, the graph runs op by op, and is not kept.
        """
        first = len(self.log.reports)

        def inner(graph_module: GraphModule, examples: Sequence[Any]) -> Runner:
            context = self._context(plan)
            return compile_with(graph_module, examples, context, self._compile)

        again = torch.compile(copy_module(self._pristine), backend=inner)
        result = again(*inputs)
        if compiled := self.log.reports[first:]:
            self._variants[plan.digest] = again, compiled[0]
            self.log.last = compiled[0]
        return result

    def _run_op_by_op(self, inputs: Sequence[Any]) -> Any:
        """Run the graph as eager mode would, which copies what the ops may not have.

        AOTAutograd and Inductor do not take every graph that writes to inputs which overlap.
        """
        logger.info("a donated input overlaps another one: this call runs op by op, uncompiled")
        return self._pristine(*inputs)

    def _size(self, inputs: Sequence[Any]) -> int | None:
        if self._size_at is None:
            return None
        position, dimension = self._size_at
        value = inputs[position]
        return int(value.shape[dimension] if isinstance(value, Tensor) else value)

    def _range(self, size: int | None) -> int | None:
        """Return the compile range that *size* is in, by position."""
        if size is None:
            return None
        ranges = enumerate(self._ranges)
        return next((i for i, (low, high) in ranges if low <= size <= high), None)

    def _in_range(self, size: int | None, inputs: Sequence[Any]) -> bool:
        return self._range(size) == self._range(self._size(inputs))


def compile_with(
    graph_module: GraphModule, inputs: Sequence[Any], context: Context, compile: Compile
) -> Runner:
    """Run the passes on a graph that Dynamo traced, and compile it. Takes *graph_module* over."""
    for module in all_graphs(graph_module):
        pipeline.run(Stage.DYNAMO, module.graph, context)
        module.recompile()
    context.report.key = store.key_of(
        graph_module, context.plan, inputs, grad_mode=torch.is_grad_enabled()
    )
    config = {**context.plan.options.inductor, **hooks(context)}
    runner = compile(graph_module, inputs, config)
    store.settle(context)
    return runner


def copy_module(graph_module: GraphModule) -> GraphModule:
    """Copy a graph module and the graphs that control flow in it runs; parameters are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    copied = GraphModule(graph_module, graph)
    copied.meta = dict(graph_module.meta)
    for name, inner in named_graphs(graph_module, graph_module.graph.nodes).items():
        setattr(copied, name, copy_module(inner))
    return copied


def varying_size(example_inputs: Sequence[Any]) -> tuple[int, int] | None:
    """Return which dimension of which input is the number of tokens: the first size that varies.

    Where none does, it is the first dimension of the first input.
    """
    tensors = [(i, t) for i, t in enumerate(example_inputs) if isinstance(t, Tensor) and t.ndim]
    for position, tensor in tensors:
        for dimension, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                return position, dimension
    return (tensors[0][0], 0) if tensors else None


@dataclass
class ReportLog:
    """The reports of one graph: of every selection it was compiled for, and the one that ran."""

    reports: list[Report] = field(default_factory=list)
    last: Report | None = None


def report() -> Report:
    """Return the report of the graph that was compiled last, for the selection that ran last.

    Raises:
        LookupError: nothing was compiled with the passes of opweave yet.
    """
    found = _latest.last
    if found is None:
        raise LookupError(
            "nothing was compiled by opweave yet. Call the compiled function once, with "
            "torch.compile(..., backend='opweave') or after opweave.compile.install()."
        )
    return found


def reports() -> list[Report]:
    """Return the reports of every selection that the same graph was compiled for, oldest first."""
    return list(_latest.reports)


_latest = ReportLog()


def remember(log: ReportLog) -> None:
    """Make *log* the one that :func:`report` and :func:`reports` read."""
    global _latest
    _latest = log


def registries_of(graph_module: GraphModule) -> list[Registry]:
    found = dict.fromkeys([current_registry()])
    for module in all_graphs(graph_module):
        found |= dict.fromkeys(call.op.registry for call in ir_calls(module.graph))
    return list(found)


def prepare_ops(graph_module: GraphModule) -> None:
    """Prepare the ops for calls from Python.

    Dynamo guards on the function that a call of an op is, which the first one would replace.
    """
    for op in {call.op for each in all_graphs(graph_module) for call in ir_calls(each.graph)}:
        for path in op.own_paths():
            op.ensure_prepared(path)


def _content(scope: Scope | None) -> Any:
    """Return what a scope says; two scopes that say the same share a graph."""
    if scope is None:
        return None
    lists = tuple(
        (op, tuple(map(tuple, entries))) for op, entries in scope.priorities.items() if entries
    )
    return lists, tuple(sorted(scope.required.items()))
