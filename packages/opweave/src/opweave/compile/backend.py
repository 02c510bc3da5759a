"""The entry points: the ``"opweave"`` backend, :func:`install`, and compiled graphs."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from opweave.compile import compat, pipeline
from opweave.compile.aliasing import note_writes, overlaps_another
from opweave.compile.graph import GraphInfo, all_calls, all_graphs, has_fakes, named_graphs
from opweave.compile.options import CompileError, CompileOptions, logger
from opweave.compile.passes import donated_inputs
from opweave.compile.pipeline import HOOKS, Stage, hooks
from opweave.compile.plan import Context, Plan
from opweave.compile.report import Report
from opweave.ir import Registry, current_registry
from opweave.ir.scope import Scope, current_scope
from opweave.plain_call import is_forward_ad

# Graphs compiled ahead of time and saved with ``torch.compile(...).aot_compile(...)``.
#
# A loaded graph cannot be recompiled, so it always runs the kernels that were selected when it
# was compiled, as an AOTInductor package does. An engine that caches such graphs calls
# :meth:`Precompiled.finalize_loading`, which rejects a graph of other settings.


class Precompiled(compat.SerializableCallable):
    """A loaded graph.

    Attributes:
        report: the report of its compilation.
        settings: the digest of the settings that it was compiled with, see :func:`settings_digest`.
    """

    def __init__(self, run: Runner, report: Report, donated: list[int], settings: str) -> None:
        self._run, self.report, self._donated = run, report, donated
        self.settings = settings

    def __call__(self, *inputs: Any) -> Any:
        if is_forward_ad():
            raise CompileError(
                "a graph that was compiled ahead of time does not compute forward-mode "
                "derivatives. Call the model that was compiled."
            )
        if self._donated:
            if overlaps_another(inputs, self._donated):
                raise CompileError(
                    "an input donated to maybe_inplace shares memory with another input, and the "
                    "graph, compiled ahead of time, reuses that memory. Pass a clone of one of "
                    "them, or compile with options={'inplace': False}."
                )
            note_writes(inputs, self._donated)
        return self._run(*inputs)

    def finalize_loading(self, vllm_config: object = None) -> None:
        """Check that the graph fits the current settings; vLLM calls this after loading.

        vLLM's cache key does not contain opweave's priorities and kernels. If this raises, vLLM
        compiles the model again.

        Raises:
            CompileError: priorities, kernels or plugins have changed since the compilation.
        """
        if self.settings != settings_digest():
            raise CompileError(
                "opweave's priorities, kernels or plugins have changed since this graph was "
                "compiled; compile it again."
            )

    @classmethod
    def serialize_compile_artifacts(cls, fn: Precompiled) -> bytes:
        """Serialize the graph."""
        return to_bytes(fn._run, fn.report, fn._donated, fn.settings)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Precompiled:
        """Load the output of :func:`to_bytes`, and register the kernels that it calls by name."""
        current_registry().ensure_ready()
        code, text, donated, settings = pickle.loads(data)
        report = Report.from_json(text)
        report.from_cache = True
        return cls(compat.deserialize(code), report, donated, settings)


def to_bytes(run: Runner, report: Report, donated: list[int], settings: str) -> bytes:
    """Serialize a compiled graph, its report, its donated inputs' positions and its settings."""
    return pickle.dumps((compat.serialize(run), report.to_json(), donated, settings))


def settings_digest() -> str:
    """Return a digest of the settings outside the graph and the backend options."""
    return Plan.capture([current_registry()], CompileOptions()).digest


# The callable that the backend returns: one graph, compiled per set of priorities.


Runner = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any], dict[str, Any]], Runner]
Moment = tuple[Scope | None, tuple[int, ...], int | None]  # scope, registry versions, size


class CompiledGraph(compat.SerializableCallable):
    """A compiled graph that recompiles when its kernel selection is out of date.

    The graph is compiled at once for the current priorities. A call under other priorities or
    required traits (a scope, a changed default, a new implementation), or with a size in another
    compile range, runs another variant of the graph, which is compiled on first use.

    Args:
        graph_module: the graph from Dynamo; it is modified.
        example_inputs: the inputs from Dynamo: fake or real tensors, symbolic or real numbers.
        options: backend options.
        compile: compiles the graph after the passes of the Dynamo stage; Inductor by default.

    Attributes:
        options: the backend options.
        log: the reports of the compiled variants.
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
        ahead = compat.compiles_ahead_of_time()
        self._settings = settings_digest() if ahead else ""  # of the first variant
        self._donated = donated_inputs(GraphInfo(graph_module.graph))
        self._lock = threading.RLock()
        self._variants: dict[str, tuple[Runner, Report]] = {}  # by digest of the plan
        self.log = ReportLog()
        self._plans: dict[Any, str] = {}  # digests of plans, by scope, registry versions and range
        plan = Plan.capture(self._registries, options, self._size(example_inputs))
        context = self._context(plan)
        run = compile_with(graph_module, example_inputs, context, compile)
        self._variants[plan.digest] = run, context.report
        self.log.last = context.report
        # One attribute, so that threads always see a matching pair.
        self._current = self._moment(example_inputs), run
        remember(self.log)

    def __call__(self, *inputs: Any) -> Any:
        if is_forward_ad():
            return self._run_op_by_op(inputs, "kernels do not compute forward-mode derivatives")
        moment, run = self._current
        if self._donated:
            if overlaps_another(inputs, self._donated):
                return self._run_op_by_op(inputs, "a donated input overlaps another one")
            note_writes(inputs, self._donated)
        if not self._holds(moment, inputs):
            return self._call_variant(inputs)
        return run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: CompiledGraph) -> bytes:
        """Serialize the first variant, for ``aot_compile``."""
        run, report = next(iter(fn._variants.values()))
        return to_bytes(run, report, fn._donated, fn._settings)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Callable[..., Any]:
        """Load a graph, which always runs the kernels that it was compiled with."""
        loaded = Precompiled.deserialize_compile_artifacts(data)
        remember(ReportLog([loaded.report], loaded.report))
        return loaded

    def _holds(self, moment: Moment, inputs: Sequence[Any]) -> bool:
        scope, versions, size = moment
        return (
            current_scope() is scope
            and self._registries[0].version == versions[0]
            and (len(versions) == 1 or tuple(r.version for r in self._registries) == versions)
            and (self._size_at is None or self._range(size) == self._range(self._size(inputs)))
        )

    def _moment(self, inputs: Sequence[Any]) -> Moment:
        versions = tuple(registry.version for registry in self._registries)
        return current_scope(), versions, self._size(inputs)

    def _call_variant(self, inputs: Sequence[Any]) -> Any:
        """Call the variant for the current priorities and sizes, compiling it if necessary."""
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
            if moment[0] is None:  # scopes are short-lived, so the fast path is for calls without
                self._current = moment, run
        return run(*inputs)

    def _context(self, plan: Plan) -> Context:
        context = Context(plan)
        self.log.reports.append(context.report)
        return context

    def _call_another(self, plan: Plan, inputs: Sequence[Any]) -> Any:
        """Compile the graph for another plan through Dynamo, which guards its shapes, and call it.

        The call triggers the compilation. If Dynamo is disabled, the graph runs op by op and is not
        kept as a variant.
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

    def _run_op_by_op(self, inputs: Sequence[Any], reason: str) -> Any:
        """Run the graph in eager mode, where ops copy the activations that they may not overwrite.

        AOTAutograd and Inductor do not support every graph that writes to overlapping inputs.
        """
        logger.info("%s: this call runs op by op, uncompiled", reason)
        return self._pristine(*inputs)

    def _size(self, inputs: Sequence[Any]) -> int | None:
        if self._size_at is None:
            return None
        position, dimension = self._size_at
        value = inputs[position]
        return int(value.shape[dimension] if isinstance(value, Tensor) else value)

    def _range(self, size: int | None) -> int | None:
        """Return the index of the compile range that contains *size*, if any."""
        if size is None:
            return None
        ranges = enumerate(self._ranges)
        return next((i for i, (low, high) in ranges if low <= size <= high), None)


def compile_with(
    graph_module: GraphModule, inputs: Sequence[Any], context: Context, compile: Compile
) -> Runner:
    """Run the passes on a graph from Dynamo and compile it. *graph_module* is modified."""
    context.report.is_differentiated = is_differentiated(graph_module, inputs)
    for module in all_graphs(graph_module):
        pipeline.run(Stage.DYNAMO, module.graph, context)
        module.recompile()
    context.report.key = pipeline.key_of(
        graph_module, context.plan, inputs, grad_mode=torch.is_grad_enabled()
    )
    config = {**context.plan.options.inductor, **hooks(context)}
    runner = compile(graph_module, inputs, config)
    pipeline.settle(context)
    return runner


def is_differentiated(graph_module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether autograd records a graph with these inputs."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    tensors += graph_module.parameters()
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def copy_module(graph_module: GraphModule) -> GraphModule:
    """Copy a graph module and its control-flow subgraphs; parameters are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    copied = GraphModule(graph_module, graph)
    copied.meta = dict(graph_module.meta)
    for name, inner in named_graphs(graph_module, graph_module.graph.nodes).items():
        setattr(copied, name, copy_module(inner))
    return copied


def varying_size(example_inputs: Sequence[Any]) -> tuple[int, int] | None:
    """Return the (input, dimension) that holds the number of tokens: the first dynamic size.

    Without dynamic sizes, this is the first dimension of the first input; without tensors, None.
    """
    tensors = [(i, t) for i, t in enumerate(example_inputs) if isinstance(t, Tensor) and t.ndim]
    for position, tensor in tensors:
        for dimension, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                return position, dimension
    return (tensors[0][0], 0) if tensors else None


@dataclass
class ReportLog:
    """The reports of one graph: those of all variants, and that of the variant that ran last."""

    reports: list[Report] = field(default_factory=list)
    last: Report | None = None


def report() -> Report:
    """Return the report of the last compiled graph, for the variant that ran last.

    Raises:
        LookupError: opweave has not compiled a graph yet.
    """
    if _latest.last is None:
        raise LookupError(
            "nothing was compiled by opweave yet. Call the compiled function once, with "
            "torch.compile(..., backend='opweave') or after opweave.compile.install()."
        )
    return _latest.last


def reports() -> list[Report]:
    """Return the reports of all variants of the last compiled graph, oldest first."""
    return list(_latest.reports)


_latest = ReportLog()


def remember(log: ReportLog) -> None:
    """Make :func:`report` and :func:`reports` read *log*."""
    global _latest
    _latest = log


def registries_of(graph_module: GraphModule) -> list[Registry]:
    """Return the current registry and those of the ops in the graph."""
    of_ops = (call.op.registry for call in all_calls(graph_module))
    return list(dict.fromkeys([current_registry(), *of_ops]))


def prepare_ops(graph_module: GraphModule) -> None:
    """Generate the fast paths of the ops in the graph.

    Dynamo guards on the function object of an op; the first eager call would replace it, and the
    graph would recompile.
    """
    for op in {call.op for call in all_calls(graph_module)}:
        op.prepare()


def _content(scope: Scope | None) -> Any:
    """Return the content of a scope as a hashable key: equal scopes share a variant."""
    if scope is None:
        return None
    lists = tuple(
        (op, tuple(map(tuple, entries))) for op, entries in scope.priorities.items() if entries
    )
    return lists, tuple(sorted(scope.required.items()))


# Lowering without Inductor, for other compilers, export and inspection.


def lower(
    graph_module: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    report: Report | None = None,
) -> GraphModule:
    """Return a copy of a graph with every op replaced by its selected implementation.

    Use it in backends other than Inductor, just before code generation.

    Args:
        graph_module: an inference graph from Dynamo, AOTAutograd or ``torch.export``.
        example_inputs: tensors and numbers for its inputs; required if the graph has no fake
            values.
        options: see :class:`CompileOptions`.
        report: receives the decisions.

    Raises:
        CompileError: the graph has no fake values, and *example_inputs* is None.
        IrError: see :func:`opweave.compile.backend`.
    """
    lowered = copy_module(graph_module)
    if not has_fakes(lowered.graph):
        if example_inputs is None:
            raise CompileError(
                "the graph does not describe its inputs: pass example_inputs=[...] to lower()."
            )
        compat.propagate_fakes(lowered, example_inputs)
    plan = Plan.capture(registries_of(lowered), CompileOptions.parse(options))
    context = Context(plan, report if report is not None else Report())
    for stage in Stage:
        _change(lowered, partial(pipeline.run, stage, context=context))
    return lowered


def run_lowered(
    graph_module: GraphModule, example_inputs: Sequence[Any], config: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile without code generation: the lowered graph runs op by op.

    This replaces Inductor if ``codegen=False``; *config* contains the passes.
    """

    def lowered(module: GraphModule) -> None:
        for name in HOOKS:
            _change(module, config[name])

    return compat.compile_aot(graph_module, example_inputs, lowered)


def _change(graph_module: GraphModule, change: Callable[[Graph], None]) -> None:
    """Apply *change* to the control-flow subgraphs and then to the graph, as Inductor does."""
    for module in reversed(all_graphs(graph_module)):
        change(module.graph)
        module.recompile()


# The entry points: the ``"opweave"`` backend, :func:`install` and :func:`uninstall`.


_undo: list[Callable[[], None]] = []
_logged = False  # whether the warning about a graph without ops was logged; once per process


def backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph traced by Dynamo: the ``"opweave"`` backend of ``torch.compile``.

    ``torch.compile`` wraps errors in ``BackendCompilerFailed``, whose message contains the type
    and text of the original error.

    Args:
        options: see :class:`CompileOptions`; other options are passed to Inductor.
        mode: the ``mode`` argument of ``torch.compile``.

    Raises:
        OptionError: an option is unknown or has an invalid value.
        UseAfterDonationError: the program reads a tensor that it donated to ``maybe_inplace``.
        IrError: a priority names an unknown op or provider.
    """
    parsed = CompileOptions.parse(options, mode)
    if not parsed.codegen and compat.compiles_ahead_of_time():
        raise CompileError(
            "aot_compile saves code that Inductor generates: leave out the option codegen=False."
        )
    if not parsed.codegen:
        return CompiledGraph(graph_module, example_inputs, parsed, run_lowered)
    if all_calls(graph_module):
        return CompiledGraph(graph_module, example_inputs, parsed)
    differentiated = is_differentiated(graph_module, example_inputs)
    if not parsed.recognition or differentiated:
        _warn_of_no_ops(Report(complete=True, is_differentiated=differentiated))
        return compat.compile_fx(graph_module, example_inputs, parsed.inductor)
    compiled = CompiledGraph(graph_module, example_inputs, parsed)
    _warn_of_no_ops(compiled.log.reports[0])
    return compiled


def install(**options: Any) -> None:
    """Add opweave's passes to the ``"inductor"`` backend, the default of ``torch.compile``.

    This includes AOTInductor and ``torch.export``. Graphs without IR ops are compiled as before.
    Calling it again replaces the options.

    Args:
        options: see :class:`CompileOptions`.

    Raises:
        OptionError: an option is unknown or has an invalid value.
    """
    CompileOptions.parse(options)
    uninstall()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_fx(model: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
            if compat.is_inside() or not isinstance(model, GraphModule) or not all_calls(model):
                return original(model, inputs, **kwargs)
            patches = kwargs.pop("config_patches", None) or {}
            parsed = CompileOptions.parse({**options, **patches})
            compile_ = partial(compat.compile_fx, **kwargs)
            if "inner_compile" in kwargs:  # AOTInductor expects an artifact, not a callable
                context = Context(Plan.capture(registries_of(model), parsed))
                artifact = compile_with(model, inputs, context, compile_)
                remember(ReportLog([context.report], context.report))
                return artifact
            if compat.compiles_ahead_of_time():
                raise CompileError(
                    "aot_compile cannot save a graph with opweave ops for the backend 'inductor'. "
                    "Use torch.compile(..., backend='opweave')."
                )
            return CompiledGraph(model, inputs, parsed, compile_)

        return compile_fx

    _undo.append(compat.replace_compile_fx(make))


def uninstall() -> None:
    """Undo :func:`install`."""
    while _undo:
        _undo.pop()()


def _warn_of_no_ops(report: Report) -> None:
    global _logged
    if report.nodes or not report.complete:
        return
    remember(ReportLog([report], report))
    if not _logged:
        _logged = True
        logger.warning("%s", *report.remarks)
