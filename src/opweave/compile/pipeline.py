"""The pass pipeline: the order of the passes, their timing and their records in the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import NamedTuple, cast

from torch.fx import Graph, GraphModule

from opweave.compile.context import Context
from opweave.compile.errors import UnloweredOpError
from opweave.compile.log import logger
from opweave.compile.nodes import all_graphs, inner_graphs, ir_calls
from opweave.compile.options import CompileOptions
from opweave.compile.passes.autocast import carry_autocast
from opweave.compile.passes.cleanup import clean_up
from opweave.compile.passes.donation import carry_donations
from opweave.compile.passes.fusion import fuse
from opweave.compile.passes.gradients import note_gradients
from opweave.compile.passes.lowering import is_kept, lower_functional
from opweave.compile.passes.noop import eliminate_noops
from opweave.compile.passes.plugin import run_plugin_pass
from opweave.compile.passes.recognize import recognize
from opweave.compile.passes.reuse import lower_inplace
from opweave.compile.passes.sequence import shard_tokens
from opweave.compile.plan import Plan
from opweave.compile.report import PassReport


class Stage(Enum):
    """The point in the compilation where a pass runs."""

    DYNAMO = "dynamo"  # on the graph from Dynamo
    JOINT = "joint"  # after AOTAutograd, before Inductor's first pass
    POST_GRAD = "post grad"  # after Inductor's last pass


class Pass(NamedTuple):
    """A pass, its stage, the option that enables it, and the plugin that owns it, if any."""

    name: str
    stage: Stage
    run: Callable[[Graph, Context], None]
    enabled: Callable[[CompileOptions], bool] = lambda options: True
    owner: str = ""


PASSES = (
    Pass("carry donations", Stage.DYNAMO, carry_donations),
    Pass("carry autocast", Stage.DYNAMO, carry_autocast),
    Pass("note gradients", Stage.DYNAMO, note_gradients),
    Pass("recognize", Stage.JOINT, recognize, lambda o: o.recognition),
    Pass("eliminate noops", Stage.JOINT, eliminate_noops, lambda o: o.noop_elimination),
    Pass("fuse", Stage.JOINT, fuse, lambda o: o.fusion),
    Pass("clean up", Stage.JOINT, clean_up),
    Pass("shard tokens", Stage.JOINT, shard_tokens, lambda o: o.sequence_parallelism),
    Pass("lower functional", Stage.JOINT, lower_functional),
    Pass("clean up", Stage.JOINT, clean_up),
    Pass("lower in place", Stage.POST_GRAD, lower_inplace),
    Pass("clean up", Stage.POST_GRAD, clean_up),
)


def run(stage: Stage, graph: Graph, context: Context) -> None:
    """Run the passes of *stage* on *graph* in-place.

    Graphs without IR ops are skipped.

    Raises:
        UseAfterDonationError: see :mod:`opweave.compile.passes.donation`.
        PluginPassError: a plugin's pass failed.
        UnloweredOpError: an IR op is left after the last stage.
    """
    _run(stage, graph, context)
    if stage is Stage.POST_GRAD:
        _check_lowered(graph)
    # Inductor skips the post-grad stage if the joint graph is in its cache or computes nothing.
    is_last = stage is Stage.POST_GRAD or (stage is Stage.JOINT and not _computes(graph))
    if not _is_backward(graph, stage):
        context.report.complete = is_last


def _run(stage: Stage, graph: Graph, context: Context) -> None:
    has_ops = _has_ops(stage, graph)
    todo = [s for s in steps(stage, context.plan) if has_ops or s.run is recognize]
    if not todo:
        return
    text, state = graph_text(graph), _state(graph)
    for step in steps(stage, context.plan):
        if not (has_ops or step.run is recognize):
            return  # nothing was recognized: the graph stays as it is
        start = time.perf_counter()
        step.run(graph, context)
        seconds = time.perf_counter() - start
        before, state_before, state = text, state, _state(graph)
        if not _is_same(state, state_before):
            text = graph_text(graph)
        record = PassReport(step.name, stage.value, seconds, notes=context.notes, owner=step.owner)
        if text != before:
            record.before, record.after = before, text
        context.report.passes.append(record)
        context.report.seconds += seconds
        has_ops = has_ops or _has_ops(stage, graph)
        context.notes = []
        logger.debug("%s: %.1f ms, %s", step.name, seconds * 1e3, record.notes)
    context.report.traces = len(context.tracer.traces)


def _has_ops(stage: Stage, graph: Graph) -> bool:
    """Whether *graph* calls ops, or may do so in the graphs of control flow."""
    in_dynamo = stage is Stage.DYNAMO
    return bool(ir_calls(graph)) or (in_dynamo and any(map(inner_graphs, graph.nodes)))


def steps(stage: Stage, plan: Plan) -> Iterator[Pass]:
    """Yield the enabled passes of *stage* in order; plugin passes run just before lowering."""
    for step in PASSES:
        if step.run is lower_functional and stage is step.stage:
            yield from (
                Pass(p.name, stage, partial(run_plugin_pass, p), owner=p.owner) for p in plan.passes
            )
        if step.stage is stage and step.enabled(plan.options):
            yield step


def graph_text(graph: Graph) -> str:
    """Return *graph* as Python source."""
    return graph.python_code("self").src


def _state(graph: Graph) -> list[tuple[object, ...]]:
    """Return the parts of *graph* that determine :func:`graph_text`."""
    return [(n, n.name, n.target, n.args, n.kwargs) for n in graph.nodes]


def _is_same(a: list[tuple[object, ...]], b: list[tuple[object, ...]]) -> bool:
    """Return whether two states hold the same objects.

    Comparing identities is enough, because FX replaces args and kwargs instead of mutating them.
    It spares the slow :func:`graph_text` for passes that change nothing.
    """
    return len(a) == len(b) and all(
        x is y for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    )


def _computes(graph: Graph) -> bool:
    return any(node.op not in ("placeholder", "get_attr", "output") for node in graph.nodes)


def _is_backward(graph: Graph, stage: Stage) -> bool:
    """Return whether *graph* is a backward graph, which is compiled and cached separately."""
    inputs = graph.find_nodes(op="placeholder")
    return stage is Stage.POST_GRAD and any(n.name.startswith("tangents_") for n in inputs)


def _check_lowered(graph: Graph) -> None:
    graphs = all_graphs(cast("GraphModule", graph.owning_module))
    calls = [call for each in graphs for call in ir_calls(each.graph)]
    left = [call for call in calls if not is_kept(call)]
    if left:
        raise UnloweredOpError(
            f"{', '.join(sorted({call.op.name for call in left}))} would have reached code "
            "generation. This is a bug in opweave: please report it with the program."
        )
