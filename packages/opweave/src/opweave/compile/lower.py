"""Lowering without Inductor, for other compilers, export and inspection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import Graph, GraphModule

from opweave.compile import compat, pipeline
from opweave.compile.compiled import copy_module, registries_of
from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.inductor import HOOKS
from opweave.compile.nodes import all_graphs, has_fakes
from opweave.compile.options import CompileOptions
from opweave.compile.pipeline import Stage
from opweave.compile.plan import Plan
from opweave.compile.report import Report


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
