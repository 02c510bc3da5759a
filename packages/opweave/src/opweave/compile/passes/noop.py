"""No-op elimination: remove no-ops, which would prevent the fusion of the ops around them.

==================================  ==========================================
node                                is replaced with
==================================  ==========================================
a view equal to its base            the base
a reshape of a reshape              one reshape
``slice_scatter`` of all elements   the scattered tensor
a split equal to an earlier split   the earlier split
==================================  ==========================================

Clones are kept, because the user may need them. Several slices of one tensor are kept too: merging
them into a split would change the code that plain ``torch.compile`` generates.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import VIEWS, fake_of
from opweave.compile.relocation import expression, same_layout

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


def eliminate_noops(info: GraphInfo, context: Context) -> None:
    """Remove no-op views and duplicate splits."""
    splits: dict[Any, Node] = {}
    for node in info.nodes:
        if node.op != "call_function":
            continue
        _skip_reshape(node, info)
        if node in info.returned:
            replacement = _returned_replacement(node, info)
        else:
            replacement = _replacement(node, splits)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            info.graph.erase_node(node)
            context.notes.append(f"{node.name} is {replacement}")


def _replacement(node: Node, splits: dict[Any, Node]) -> Node | None:
    """Return an earlier node with the value of *node*, if there is one."""
    if node.target in _ALL_VIEWS and _is_same_view(node.args[0], node):
        return cast("Node", node.args[0])
    if node.target is aten.slice_scatter.default and _has_layout_of(node.args[1], node):
        return cast("Node", node.args[1])
    if node.target in _SPLITS:
        first = splits.setdefault(_key(node), node)
        return first if first is not node else None
    return None


def _returned_replacement(node: Node, info: GraphInfo) -> Node | None:
    """Return an earlier node with the value of an output, if the graph may return its memory.

    AOTAutograd has recorded which outputs share memory with inputs and with each other.
    """
    if node.target is not aten.slice_scatter.default or not _has_layout_of(node.args[1], node):
        return None
    source = cast("Node", node.args[1])
    aliases = info.sharing(source)
    is_new = all(alias.op == "call_function" and alias not in info.returned for alias in aliases)
    return source if is_new else None


def _skip_reshape(node: Node, info: GraphInfo) -> None:
    """Let a reshape of a reshape use the input of the first one, if that is contiguous."""
    first = node.args[0] if node.target in _RESHAPES else None
    if not isinstance(first, Node) or first.target not in _RESHAPES or first in info.returned:
        return
    source = cast("Node", first.args[0])
    value, made = fake_of(source), fake_of(node)
    is_view = compat.storage_key(value) == compat.storage_key(made)  # neither reshape copies
    if isinstance(value, Tensor) and value.is_contiguous() and is_view:
        node.args = (source, *node.args[1:])


def _is_same_view(viewed: object, view: Node) -> bool:
    if not _has_layout_of(viewed, view):
        return False
    offsets = (fake_of(node).storage_offset() for node in (cast("Node", viewed), view))
    first, second = map(expression, offsets)
    return bool(first == second)


def _has_layout_of(node: object, other: Node) -> bool:
    """Return whether two nodes have the same sizes and strides, for all dynamic sizes."""
    return isinstance(node, Node) and same_layout(fake_of(node), fake_of(other))


def _key(node: Node) -> Any:
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
