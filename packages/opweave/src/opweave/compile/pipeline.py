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
from opweave.compile.graph_info import GraphInfo
from opweave.compile.log import logger
from opweave.compile.nodes import all_graphs, ir_calls
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
    run: Callable[[GraphInfo, Context], None]
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
    info = _run(stage, GraphInfo(graph), context)
    if stage is Stage.POST_GRAD:
        _check_lowered(graph)
    # Inductor skips the post-grad stage if the joint graph is in its cache or computes nothing.
    is_last = stage is Stage.POST_GRAD or (stage is Stage.JOINT and not info.computes)
    # A backward graph is compiled and cached separately.
    if not (stage is Stage.POST_GRAD and info.has_tangents):
        context.report.complete = is_last


def _run(stage: Stage, info: GraphInfo, context: Context) -> GraphInfo:
    """Run the passes of *stage*, and return the facts about the graph after them."""
    has_ops = bool(info.calls) or (stage is Stage.DYNAMO and info.has_subgraphs)
    for step in steps(stage, context.plan):
        if not (has_ops or step.run is recognize):
            continue
        before = info.text  # before the pass changes the graph
        start = time.perf_counter()
        step.run(info, context)
        seconds = time.perf_counter() - start
        info = info.current()
        record = PassReport(step.name, stage.value, seconds, notes=context.notes, owner=step.owner)
        if info.text != before:
            record.before, record.after = before, info.text
        context.report.passes.append(record)
        context.report.seconds += seconds
        has_ops = has_ops or bool(info.calls)
        context.notes = []
        logger.debug("%s: %.1f ms, %s", step.name, seconds * 1e3, record.notes)
    if has_ops:
        context.report.traces = len(context.tracer.traces)
    return info


def steps(stage: Stage, plan: Plan) -> Iterator[Pass]:
    """Yield the enabled passes of *stage* in order; plugin passes run just before lowering."""
    for step in PASSES:
        if step.run is lower_functional and stage is step.stage:
            yield from (
                Pass(p.name, stage, partial(run_plugin_pass, p), owner=p.owner) for p in plan.passes
            )
        if step.stage is stage and step.enabled(plan.options):
            yield step


def _check_lowered(graph: Graph) -> None:
    graphs = all_graphs(cast("GraphModule", graph.owning_module))
    calls = [call for each in graphs for call in ir_calls(each.graph)]
    left = [call for call in calls if not is_kept(call)]
    if left:
        raise UnloweredOpError(
            f"{', '.join(sorted({call.op.name for call in left}))} would have reached code "
            "generation. This is a bug in opweave: please report it with the program."
        )
