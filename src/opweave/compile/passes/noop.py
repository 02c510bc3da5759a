"""No-op elimination: what changes nothing must not stand between two ops that could be fused.

==================================  ==========================================
this                                becomes
==================================  ==========================================
a view equal to what it views       what it is a view of
a reshape of a reshape              one reshape
``slice_scatter`` of all elements   what is scattered
a second split like another         the first one
==================================  ==========================================

A ``clone`` is never touched: whoever wrote it may have had a reason. Several slices of one tensor
stay slices: one split in their place would give other code than plain ``torch.compile`` does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.nodes import fake_of
from opweave.compile.patterns import VIEWS
from opweave.compile.relocation import same_layout

aten = torch.ops.aten
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_ALL_VIEWS = VIEWS | {
    aten.slice.Tensor,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.as_strided.default,
}


def eliminate_noops(graph: Graph, context: Context) -> None:
    """Take out views that view nothing, and splits that were made before."""
    splits: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_returned(node):
            continue
        _skip_reshape(node)
        replacement = _replacement(node, splits)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            context.notes.append(f"{node.name} is {replacement}")


def _replacement(node: Node, splits: dict[Any, Node]) -> Node | None:
    """Return the node that has the value of *node*, if there is one."""
    if node.target in _ALL_VIEWS and _is_same_view(node.args[0], node):
        return cast("Node", node.args[0])
    if node.target is aten.slice_scatter.default and _has_layout_of(node.args[1], node):
        return cast("Node", node.args[1])
    if node.target in _SPLITS:
        first = splits.setdefault(_key(node), node)
        return first if first is not node else None
    return None


def _skip_reshape(node: Node) -> None:
    """Let a reshape of a reshape take what the first one took, where that is contiguous."""
    first = node.args[0] if node.target in _RESHAPES else None
    if not isinstance(first, Node) or first.target not in _RESHAPES or _is_returned(first):
        return
    source = cast("Node", first.args[0])
    value, made = fake_of(source), fake_of(node)
    one_memory = compat.storage_key(value) == compat.storage_key(made)  # none of them copied
    if isinstance(value, Tensor) and value.is_contiguous() and one_memory:
        node.args = (source, *node.args[1:])


def _is_same_view(viewed: object, view: Node) -> bool:
    if not _has_layout_of(viewed, view):
        return False
    offsets = (fake_of(node).storage_offset() for node in (cast("Node", viewed), view))
    first, second = (o.node.expr if isinstance(o, SymInt) else o for o in offsets)
    return bool(first == second)


def _has_layout_of(node: object, other: Node) -> bool:
    """Whether two nodes have the same sizes and strides, for every size the graph is for."""
    return isinstance(node, Node) and same_layout(fake_of(node), fake_of(other))


def _is_returned(node: Node) -> bool:
    """Whether the graph returns *node*: AOTAutograd knows which outputs are views of what."""
    return any(user.op == "output" for user in node.users)


def _key(node: Node) -> Any:
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
