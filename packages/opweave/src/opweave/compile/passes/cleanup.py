"""Topological sort and dead code elimination."""

from __future__ import annotations

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.graph_info import GraphInfo


def clean_up(info: GraphInfo, context: Context) -> None:
    """Sort the nodes topologically, and remove unused nodes that do not write to memory."""
    compat.sort_topologically(info.graph)
    info.graph.eliminate_dead_code()
    if unused := len(info.nodes) - len(info.graph.nodes):
        context.notes.append(f"{unused} unused nodes")
