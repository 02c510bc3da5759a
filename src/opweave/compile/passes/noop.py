"""Noop elimination: what changes nothing must not stand between two ops that could be fused.

============================  ==========================================
this                          becomes
============================  ==========================================
a view to the shape it has    what it is a view of
a second split like another   the first one
============================  ==========================================

A ``clone`` is never touched: whoever wrote it may have had a reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile.context import Context
from opweave.compile.nodes import fake_of
from opweave.compile.patterns import VIEWS

_SPLITS = {
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.chunk.default,
}


def eliminate_noops(graph: Graph, context: Context) -> None:
    """Take out views that view nothing, and splits that were made before."""
    splits: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_returned(node):
            continue
        replacement = None
        if node.target in VIEWS and _is_noop(node):
            replacement = node.args[0]
        elif node.target in _SPLITS:
            first = splits.setdefault(_key(node), node)
            replacement = first if first is not node else None
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            context.notes.append(f"{node.name} is {replacement}")


def _is_noop(node: Node) -> bool:
    viewed, view = fake_of(node.args[0]), fake_of(node)  # type: ignore[arg-type]
    if not isinstance(viewed, Tensor):
        return False
    return bool(viewed.shape == view.shape and viewed.stride() == view.stride())


def _is_returned(node: Node) -> bool:
    """Whether the graph returns *node*: AOTAutograd knows which outputs are views of what."""
    return any(user.op == "output" for user in node.users)


def _key(node: Node) -> Any:
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
