"""Remove writes to memory that is not read afterwards, as for unused outputs of in-place kernels.

Dead code elimination keeps nodes that write to memory, but Inductor fails on a write to an unused
buffer.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.aliases import Aliases
from opweave.compile.inplace import written_results


def remove_dead_writes(graph: Graph) -> None:
    """Erase aten operators whose only effect is to write to intermediate memory not read later.

    Operators of other namespaces stay: they may have side effects that are not in the schema.
    """
    writes = [node for node in graph.nodes if _is_aten_write(node)]
    if not writes:
        return
    aliases = Aliases(graph)
    for node in reversed(writes):  # a write may be the only reader of an earlier one
        if not node.users and all(_is_dead(value, node, aliases) for value in _written(node)):
            graph.erase_node(node)
            aliases.forget([node])


def _is_aten_write(node: Node) -> bool:
    """Return whether *node* only writes to the arguments that it returns."""
    if not compat.is_mutable(node.target):
        return False
    target = cast("compat.OpOverload", node.target)
    written = sum(argument.is_write for argument in target._schema.arguments)
    return (
        target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in target.tags  # advances the generator
        and len(_written(node)) == written == len(target._schema.returns) > 0
    )


def _written(node: Node) -> list[Node]:
    target = cast("compat.OpOverload", node.target)
    return list(written_results(node, target).values())


def _is_dead(value: Node, write: Node, aliases: Aliases) -> bool:
    """Return whether *value* is in intermediate memory that is not read after *write*."""
    is_own = all(alias.op not in ("placeholder", "get_attr") for alias in aliases.sharing(value))
    return is_own and not aliases.readers_after(value, write)
