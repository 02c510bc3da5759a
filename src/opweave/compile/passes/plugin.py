"""Runs the passes of plugins, and completes the graphs that they leave."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.fx import Graph, Node, map_arg

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.errors import PluginPassError
from opweave.compile.nodes import fake_of, tensors_of
from opweave.compile.passes.cleanup import clean_up
from opweave.compile.plugin_passes import PluginPass
from opweave.ir.errors import described


def run_plugin_pass(step: PluginPass, graph: Graph, context: Context) -> None:
    """Run a pass of a plugin on *graph*, which it changes.

    Raises:
        PluginPassError: it raised, or made a graph that does not hold together.
    """
    try:
        step.function(graph, context)
        compat.sort_topologically(graph)
        for node in graph.nodes:
            _complete(node)
        clean_up(graph, context)
        graph.lint()
    except Exception as error:
        by = f" of plugin {step.owner}" if step.owner else ""
        raise PluginPassError(
            f"compiler pass {step.name}{by} failed: {described(error)}. Mend it, or "
            "compile with the option plugin_passes=False."
        ) from error


def _complete(node: Node) -> None:
    """Give a node that has no fake value the one that its arguments give it."""
    if node.op != "call_function" or "val" in node.meta:
        return
    args, kwargs = map_arg((node.args, node.kwargs), fake_of)
    tensors = [tensor for given in node.all_input_nodes for tensor in tensors_of(given)]
    with torch.no_grad(), compat.fake_mode_of(tensors) or nullcontext():
        node.meta["val"] = cast("Any", node.target)(*args, **kwargs)
