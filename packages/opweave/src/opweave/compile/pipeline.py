"""The pass pipeline, and the Inductor passes that run it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.fx import Graph, GraphModule

from opweave.compile import compat, fingerprint, passes
from opweave.compile.fuse import fuse
from opweave.compile.graph import GraphInfo, all_calls, all_graphs, fake_of, graph_text, has_fakes
from opweave.compile.lowering import is_kept, lower_functional, lower_inplace
from opweave.compile.options import CompileOptions, UnloweredOpError, logger
from opweave.compile.plan import Context, Plan
from opweave.compile.recognize import recognize
from opweave.compile.report import WITH_GRADIENTS, PassReport, Report
from opweave.compile.sequence import shard_tokens
from opweave.compile.tracing import copy_through_views

# The cache of reports, next to Inductor's artifacts: a cache hit skips the passes.
#
# The key of a report is a digest of the graph, the shapes and dtypes of its inputs, and the
# plan. Each report is stored under two keys, because there are two caches. AOTAutograd's key
# contains the grad mode and the graph from Dynamo, with the names of the program; Inductor's key
# contains the graph from AOTAutograd, and is looked up after the joint stage. Calls with
# gradients are reported in the Dynamo stage, which always runs, so they never come from the
# cache.


def key_of(
    graph_module: GraphModule,
    plan: Plan,
    inputs: Sequence[Any] = (),
    *,
    grad_mode: bool | None = None,
) -> str:
    """Return the key of the report of a graph.

    Args:
        graph_module: the graph, with its subgraphs.
        plan: the plan of the compilation.
        inputs: the inputs, if the graph has no fake values.
        grad_mode: the grad mode; None for a graph from AOTAutograd, which does not depend on it.
    """
    graph = graph_module.graph
    parts = [graph_text(module.graph) for module in all_graphs(graph_module)]
    parts += [plan.digest, str(grad_mode)]
    if has_fakes(graph):
        inputs = [fake_of(node) for node in graph.find_nodes(op="placeholder")]
    return fingerprint.digest_of([*parts, *map(_describe, inputs)])


def settle(context: Context) -> None:
    """Store the report if all passes ran; otherwise load the stored one into it."""
    report = context.report
    keys = [key for key in (report.key, context.joint_key) if key]
    outdated = keys
    if report.complete:
        logger.debug("cache miss: compiled %d calls of ops", len(report.nodes))
    else:
        report.from_cache = True
        stored = {key: _read(key) for key in keys}
        outdated = [key for key, earlier in stored.items() if earlier is None]
        first = next(filter(None, stored.values()), None)
        if first is None:
            logger.debug("cache hit, but the report of the artifact is missing")
            return
        _complete(report, first)
        logger.debug("cache hit: loaded the report of the first compilation")
    for key in outdated:
        _write(Path(compat.cache_directory(), _name(key)), report.to_json())
    for key in keys:
        compat.record_artifact(_name(key), report.to_dict())


def _complete(report: Report, stored: Report) -> None:
    """Add the *stored* report to *report*, which already contains the calls with gradients."""
    nodes = [n for n in report.nodes if n.stage == WITH_GRADIENTS]
    nodes += [n for n in stored.nodes if n.stage != WITH_GRADIENTS]
    vars(report).update(vars(stored), key=report.key, from_cache=True, nodes=nodes)


def _name(key: str) -> str:
    return f"opweave/reports/{key}.json"


def _read(key: str) -> Report | None:
    path = Path(compat.cache_directory(), _name(key))
    try:
        return Report.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("no report in %s: %s", path, error)
        return None


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = f"{tuple(value.shape)}{tuple(value.stride())}"
        return f"{value.dtype}{layout}{value.device}{value.requires_grad}"
    return repr(value)


# The pass pipeline: the order of the passes, their timing and their records in the report.


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
    Pass("carry donations", Stage.DYNAMO, passes.carry_donations),
    Pass("carry autocast", Stage.DYNAMO, passes.carry_autocast),
    Pass("note gradients", Stage.DYNAMO, passes.note_gradients),
    Pass("recognize", Stage.JOINT, recognize, lambda o: o.recognition),
    Pass("eliminate noops", Stage.JOINT, passes.eliminate_noops, lambda o: o.noop_elimination),
    Pass("fuse", Stage.JOINT, fuse, lambda o: o.fusion),
    Pass("clean up", Stage.JOINT, passes.clean_up),
    Pass("shard tokens", Stage.JOINT, shard_tokens, lambda o: o.sequence_parallelism),
    Pass("lower functional", Stage.JOINT, lower_functional),
    Pass("clean up", Stage.JOINT, passes.clean_up),
    Pass("lower in place", Stage.POST_GRAD, lower_inplace),
    Pass("clean up", Stage.POST_GRAD, passes.clean_up),
)


def run(stage: Stage, graph: Graph, context: Context) -> None:
    """Run the passes of *stage* on *graph* in-place.

    Graphs without IR ops are skipped.

    Raises:
        UseAfterDonationError: see :mod:`opweave.compile.passes`.
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
            for p in plan.passes:
                yield Pass(p.name, stage, partial(passes.run_plugin_pass, p), owner=p.owner)
        if step.stage is stage and step.enabled(plan.options):
            yield step


def _check_lowered(graph: Graph) -> None:
    calls = all_calls(cast("GraphModule", graph.owning_module))
    left = sorted({call.op.name for call in calls if not is_kept(call)})
    if left:
        raise UnloweredOpError(
            f"{', '.join(left)} would have reached code generation. This is a bug in opweave: "
            "please report it with the program."
        )


# Custom Inductor passes that run the joint and post-grad stages.


HOOKS = {"joint_custom_pre_pass": Stage.JOINT, "post_grad_custom_post_pass": Stage.POST_GRAD}


class StagePass(compat.CustomGraphPass):
    """The passes of one stage, followed by the user's own passes for the same hook.

    Its UUID, a part of the cache keys of Inductor and AOTAutograd, covers everything except the
    graph that the result depends on.
    """

    def __init__(self, stage: Stage, context: Context, others: Sequence[Any]) -> None:
        self._stage, self._context, self._others = stage, context, list(others)

    def __call__(self, graph: Graph) -> None:
        run(self._stage, graph, self._context)
        for other in self._others:
            other(graph)
        if self._stage is Stage.POST_GRAD and self._context.plan.options.codegen:
            copy_through_views(graph)
        if self._stage is Stage.JOINT:  # Inductor calls this for subgraphs first
            whole = cast("GraphModule", graph.owning_module)
            self._context.joint_key = key_of(whole, self._context.plan)

    def uuid(self) -> Any | None:
        others = [other.uuid() if hasattr(other, "uuid") else None for other in self._others]
        if None in others:
            return None  # a pass without a UUID disables Inductor's caches, as without opweave
        return (self._stage.value, self._context.plan.digest, tuple(map(repr, others)))


def hooks(context: Context) -> dict[str, Any]:
    """Return the Inductor options that install the passes."""
    return {
        name: StagePass(stage, context, compat.configured_passes(name))
        for name, stage in HOOKS.items()
    }
