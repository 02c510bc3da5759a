"""Topological sort and dead code elimination."""

from __future__ import annotations

from torch.fx import Graph

from opweave.compile import compat
from opweave.compile.context import Context


def clean_up(graph: Graph, context: Context) -> None:
    """Sort the nodes topologically, and remove unused nodes that do not write to memory."""
    compat.sort_topologically(graph)
    before = len(graph.nodes)
    graph.eliminate_dead_code()
    if len(graph.nodes) != before:
        context.notes.append(f"{before - len(graph.nodes)} unused nodes")
