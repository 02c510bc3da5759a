"""Remove writes to memory that is not read afterwards, as for unused outputs of in-place kernels.

Dead code elimination keeps nodes that write to memory, but Inductor fails on a write to an unused
buffer.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Node

from opweave.compile import compat
from opweave.compile.graph_info import GraphInfo
from opweave.compile.inplace import written_results


def remove_dead_writes(info: GraphInfo) -> None:
    """Erase aten operators whose only effect is to write to intermediate memory not read later.

    Operators of other namespaces stay: they may have side effects that are not in the schema.
    """
    for node in reversed(info.writes):  # a write may be the only reader of an earlier one
        if _is_dead(node, info):
            info.graph.erase_node(node)
            info.forget([node])


def _is_dead(node: Node, info: GraphInfo) -> bool:
    """Return whether *node* only writes to arguments that it returns, and that nothing reads."""
    target = cast("compat.OpOverload", node.target)
    written = written_results(node, target).values()
    arguments = sum(argument.is_write for argument in target._schema.arguments)
    return (
        not node.users
        and target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in target.tags  # advances the generator
        and len(written) == arguments == len(target._schema.returns) > 0
        and all(_is_intermediate(n, info) and not info.readers_after(n, node) for n in written)
    )


def _is_intermediate(node: Node, info: GraphInfo) -> bool:
    return all(alias.op not in ("placeholder", "get_attr") for alias in info.sharing(node))
