"""The entry points: the ``"opweave"`` backend, :func:`install` and :func:`uninstall`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from opweave.compile import compat
from opweave.compile.compiled import (
    CompiledGraph,
    ReportLog,
    compile_with,
    is_differentiated,
    registries_of,
    remember,
)
from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.log import logger
from opweave.compile.lower import run_lowered
from opweave.compile.nodes import all_graphs, ir_calls
from opweave.compile.options import CompileOptions
from opweave.compile.plan import Plan
from opweave.compile.report import Report

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
    if _has_ops(graph_module):
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
            if compat.is_inside() or not isinstance(model, GraphModule) or not _has_ops(model):
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


def _has_ops(graph_module: GraphModule) -> bool:
    return any(ir_calls(module.graph) for module in all_graphs(graph_module))
