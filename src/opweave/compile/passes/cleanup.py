"""Order and dead code, after other passes."""

from __future__ import annotations

from torch.fx import Graph

from opweave.compile import compat
from opweave.compile.context import Context


def clean_up(graph: Graph, context: Context) -> None:
    """Put every node after its inputs, and take out what nobody uses (writes to memory stay)."""
    compat.sort_topologically(graph)
    before = len(graph.nodes)
    graph.eliminate_dead_code()
    if len(graph.nodes) != before:
        context.notes.append(f"{before - len(graph.nodes)} unused nodes")
