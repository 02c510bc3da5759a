"""Compiler passes from plugins. They run in the joint stage, after fusion and before lowering.

A pass is a function ``(graph, context) -> None`` that changes an FX graph in-place and may append
to ``context.notes`` for the report. The graph is functional, contains at least one IR op, and every
node has a fake value in ``meta["val"]``. opweave computes the fake values of new nodes, removes
unused nodes and sorts the graph afterwards. Every IR op is one node;
:func:`opweave.compile.nodes.ir_calls` returns them::

    def scale_once(graph: Graph, context: Context) -> None:
        for call in ir_calls(graph):
            if call.op.name == "acme_scale" and call.argument("factor") == 1.0:
                replace(call, [call.argument("x")])
                context.notes.append(f"{call.node.name} is a no-op")

A pass must depend only on the graph: the cache key of compiled code contains the source of the
pass, but not other data that it reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Graph

from opweave import platforms
from opweave.compile import fingerprint
from opweave.compile.errors import PluginPassError
from opweave.platforms.passes import PassReference, pass_references
from opweave.plugins import resolve_obj_by_qualname
from opweave.plugins.errors import ReferenceNameError

if TYPE_CHECKING:
    from opweave.compile.context import Context

PassFunction = Callable[[Graph, "Context"], None]


@dataclass(frozen=True)
class PluginPass:
    """A pass, its qualified name, and its plugin; "" if the program itself registered it."""

    name: str
    owner: str
    function: PassFunction

    @property
    def digest(self) -> str:
        """A digest of the name, owner and source."""
        return fingerprint.digest_of(
            [self.name, self.owner, fingerprint.of_function(self.function)]
        )


def plugin_passes() -> tuple[PluginPass, ...]:
    """Return the passes of plugins and of the platform, in execution order.

    Raises:
        PluginPassError: a pass does not exist, or is not a function of a graph and a context.
    """
    return tuple(map(_resolve, pass_references(platforms.current_platform)))


def _resolve(reference: PassReference) -> PluginPass:
    owner = "" if reference.owner is None else str(reference.owner)
    try:
        function = resolve_obj_by_qualname(reference.qualname)
    except ReferenceNameError as error:
        by = f" of plugin {owner}" if owner else ""
        raise PluginPassError(
            f"compiler pass {reference.qualname}{by} does not exist: {error} To compile without "
            "it, use the option plugin_passes=False."
        ) from error
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise PluginPassError(
            f"compiler pass {reference.qualname} is {function!r}; it should be a function "
            f"(graph, context) -> None ({error})."
        ) from error
    return PluginPass(reference.qualname, owner, function)
