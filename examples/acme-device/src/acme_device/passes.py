"""A compiler pass: it finds what the device has a kernel for, and puts the op there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from acme_device.ops import acme_scaled_residual
from opweave.compile.graph import fake_of
from opweave.compile.plan import Context

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


def scale_residuals(graph: Graph, context: Context) -> None:
    """Replace ``residual + x * scale``, for a number *scale*, by ``acme_scaled_residual``.

    The op rounds where the two operators round, so results stay what they were, bit for bit.
    """
    for node in graph.find_nodes(op="call_function", target=_ADD):
        found = _scaled(node)
        if found is not None:
            x, residual, scale = found
            with graph.inserting_before(node):
                call = graph.call_function(
                    acme_scaled_residual.torch_op, (x, residual, float(scale))
                )
            node.replace_all_uses_with(call)
            graph.erase_node(node)
            context.notes.append(f"{node.name} is acme_scaled_residual")


def _scaled(node: Node) -> tuple[Node, Node, float] | None:
    """Return ``(x, residual, scale)`` if *node* is such a sum, and nobody else has the product."""
    if node.kwargs:  # alpha
        return None
    for product, residual in (node.args, node.args[::-1]):
        if isinstance(product, Node) and product.target is _MUL and len(product.users) == 1:
            x, scale = product.args
            if isinstance(scale, (int, float)) and _alike(x, residual):
                return x, residual, scale
    return None


def _alike(x: object, residual: object) -> bool:
    if not isinstance(x, Node) or not isinstance(residual, Node):
        return False
    first, second = fake_of(x), fake_of(residual)
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.is_floating_point()
        and (first.shape, first.dtype) == (second.shape, second.dtype)
    )
