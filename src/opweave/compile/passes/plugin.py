"""Runs the passes of plugins, and completes the graphs that they leave."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.errors import PluginPassError
from opweave.compile.nodes import fake_of, ir_call, tensors_of
from opweave.compile.passes.cleanup import clean_up
from opweave.compile.plugin_passes import PluginPass
from opweave.ir.errors import described

_VALUES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, list, tuple)


def run_plugin_pass(step: PluginPass, graph: Graph, context: Context) -> None:
    """Run a pass of a plugin on *graph*, which it changes.

    Raises:
        PluginPassError: it raised, or made a graph that does not hold together.
    """
    before = _interface(graph)
    try:
        step.function(graph, context)
        _check_interface(before, _interface(graph))
        compat.sort_topologically(graph)
        for node in graph.nodes:
            _check(node)
            _complete(node)
        clean_up(graph, context)
        graph.lint()
    except (Exception, SystemExit) as error:
        by = f" of plugin {step.owner}" if step.owner else ""
        raise PluginPassError(
            f"compiler pass {step.name}{by} failed: {described(error)}. Mend it, or "
            "compile with the option plugin_passes=False."
        ) from error


def _interface(graph: Graph) -> dict[str, Any]:
    """Return what the rest of the compiler knows a graph by."""
    outputs = [node.args[0] for node in graph.nodes if node.op == "output"]
    return {
        "inputs": [node.name for node in graph.nodes if node.op == "placeholder"],
        "output nodes": len(outputs),
        "outputs": sum(len(o) if isinstance(o, (list, tuple)) else 1 for o in outputs),
    }


def _check_interface(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what, wanted in before.items():
        if after[what] != wanted:
            raise ValueError(f"the graph had {what} {wanted}, and has {after[what]} now")


def _check(node: Node) -> None:
    """Raise if a node is a call of an op that the rest of the compiler could not read."""
    call = ir_call(node)  # which looks at the number and names of its arguments
    for given in node.all_input_nodes if call else ():
        value = given.meta.get("val")
        if not isinstance(value, _VALUES):
            raise TypeError(f"{given.name} has {type(value).__name__} for its meta['val']")


def _complete(node: Node) -> None:
    """Give a node that has no fake value the one that its arguments give it."""
    if node.op != "call_function" or "val" in node.meta:
        return
    args, kwargs = map_arg((node.args, node.kwargs), fake_of)
    tensors = [tensor for given in node.all_input_nodes for tensor in tensors_of(given)]
    with torch.no_grad(), compat.fake_mode_of(tensors) or nullcontext():
        node.meta["val"] = cast("Any", node.target)(*args, **kwargs)
