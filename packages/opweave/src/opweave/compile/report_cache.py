"""The cache of reports, next to Inductor's artifacts: a cache hit skips the passes.

The key of a report is a digest of the graph, the shapes and dtypes of its inputs, and the plan.
Each report is stored under two keys, because there are two caches. AOTAutograd's key contains the
grad mode and the graph from Dynamo, with the names of the program; Inductor's key contains the
graph from AOTAutograd, and is looked up after the joint stage. Calls with gradients are reported in
the Dynamo stage, which always runs, so they never come from the cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from opweave.compile import compat, fingerprint
from opweave.compile.context import Context
from opweave.compile.log import logger
from opweave.compile.nodes import all_graphs, fake_of, graph_text, has_fakes
from opweave.compile.plan import Plan
from opweave.compile.report import WITH_GRADIENTS, Report


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
        filed = {key: _read(key) for key in keys}
        outdated = [key for key, found in filed.items() if found is None]
        found = next(filter(None, filed.values()), None)
        if found is None:
            logger.debug("cache hit, but the report of the artifact is missing")
            return
        _complete(report, found)
        logger.debug("cache hit: loaded the report of the first compilation")
    for key in outdated:
        _write(Path(compat.cache_directory(), _name(key)), report.to_json())
    for key in keys:
        compat.record_artifact(_name(key), report.to_dict())


def _complete(report: Report, filed: Report) -> None:
    """Add the *filed* report to *report*, which already contains the calls with gradients."""
    nodes = [n for n in report.nodes if n.stage == WITH_GRADIENTS]
    nodes += [n for n in filed.nodes if n.stage != WITH_GRADIENTS]
    own = {"key": report.key, "from_cache": True, "nodes": nodes}
    vars(report).update(vars(filed), **own)


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
