"""Reports, filed next to Inductor's cached artifacts: a cache hit runs no pass, and has a report.

A report depends on the graph that Dynamo traced, the shapes and dtypes of its inputs, and the plan:
its key is a digest of these.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from opweave.compile import compat, fingerprint
from opweave.compile.log import logger
from opweave.compile.nodes import fake_of, has_fakes
from opweave.compile.pipeline import graph_text
from opweave.compile.plan import Plan
from opweave.compile.report import Report


def key_of(graph_module: GraphModule, inputs: Sequence[Any], plan: Plan) -> str:
    """Return what the report of this compilation is filed under."""
    graph = graph_module.graph
    parts = [graph_text(graph), plan.digest, str(torch.is_grad_enabled())]
    if has_fakes(graph):
        inputs = [fake_of(node) for node in graph.nodes if node.op == "placeholder"]
    return fingerprint.digest_of([*parts, *map(_describe, inputs)])


def settle(report: Report) -> None:
    """File *report* if the passes have run, or fill it with the one filed earlier."""
    name = f"opweave/reports/{report.key}.json"
    path = Path(compat.cache_directory(), name)
    if report.complete:
        _write(path, report.to_json())
        logger.debug("cache miss: compiled %d calls of ops", len(report.nodes))
    else:
        try:
            found = Report.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("cache hit, but no report of the artifact: %s", error)
            return
        vars(report).update(vars(found), from_cache=True)
        logger.debug("cache hit: the report is the one of the first compilation")
    compat.record_artifact(name, report.to_dict())


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.device}"
    return repr(value)
