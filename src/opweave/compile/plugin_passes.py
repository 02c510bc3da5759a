"""Passes that plugins bring. They run in the joint stage, just before ops are lowered.

Ops are whole there, and fused already.

A pass is a function ``(graph, context) -> None`` that changes an FX graph; what it puts into
``context.notes`` is in the report. It sees graphs with at least one op of the IR, functional, with
a fake value in every node's ``meta["val"]``, and need not set those of the nodes it makes, remove
unused nodes or keep the order: that is done for it. An IR op in the graph is one node, which
:func:`opweave.compile.nodes.ir_calls` reads::

    def scale_once(graph: Graph, context: Context) -> None:
        for call in ir_calls(graph):
            if call.op.name == "acme_scale" and call.argument("factor") == 1.0:
                replace(call, [call.argument("x")])
                context.notes.append(f"{call.node.name} changes nothing")

It must depend on the graph and on what is in it only: its source is part of the key of compiled
code, and what it reads elsewhere is not.
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
    """A pass, its qualified name, and the plugin that brings it; empty where the program does."""

    name: str
    owner: str
    function: PassFunction

    @property
    def digest(self) -> str:
        """What tells it from another version of itself."""
        return fingerprint.digest_of(
            [self.name, self.owner, fingerprint.of_function(self.function)]
        )


def plugin_passes() -> tuple[PluginPass, ...]:
    """Return the passes that plugins and the platform bring, in the order in which they run.

    Raises:
        PluginPassError: one does not exist, or is no function of a graph and a context.
    """
    return tuple(map(_resolve, pass_references(platforms.current_platform)))


def _resolve(reference: PassReference) -> PluginPass:
    owner = "" if reference.owner is None else str(reference.owner)
    try:
        function = resolve_obj_by_qualname(reference.qualname)
    except ReferenceNameError as error:
        by = f" of plugin {owner}" if owner else ""
        raise PluginPassError(
            f"there is no compiler pass {reference.qualname}{by}: {error} To go on without it, "
            "compile with the option plugin_passes=False."
        ) from error
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise PluginPassError(
            f"compiler pass {reference.qualname} is {function!r}; it should be a function "
            f"(graph, context) -> None ({error})."
        ) from error
    return PluginPass(reference.qualname, owner, function)
