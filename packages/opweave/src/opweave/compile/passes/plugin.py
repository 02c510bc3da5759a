"""Run plugin passes, and validate and complete the graphs that they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.errors import PluginPassError
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import computed_fake, ir_call, tensors_of
from opweave.compile.passes.cleanup import clean_up
from opweave.compile.plugin_passes import PluginPass
from opweave.ir.errors import described

_VALUES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, list, tuple)


def run_plugin_pass(step: PluginPass, info: GraphInfo, context: Context) -> None:
    """Run a plugin pass on a graph in-place.

    Raises:
        PluginPassError: the pass raised, or left an invalid graph.
    """
    graph, before = info.graph, _interface(info.graph)
    try:
        step.function(graph, context)
        _check_interface(before, _interface(graph))
        compat.sort_topologically(graph)
        for node in graph.nodes:
            _check(node)
            _complete(node)
        clean_up(GraphInfo(graph), context)
        graph.lint()
    except (Exception, SystemExit) as error:
        by = f" of plugin {step.owner}" if step.owner else ""
        raise PluginPassError(
            f"compiler pass {step.name}{by} failed: {described(error)}. Fix it, or "
            "compile with the option plugin_passes=False."
        ) from error


def _interface(graph: Graph) -> dict[str, Any]:
    """Return the inputs and outputs of *graph*, which a pass must not change."""
    outputs = [node.args[0] for node in graph.nodes if node.op == "output"]
    return {
        "inputs": [node.name for node in graph.find_nodes(op="placeholder")],
        "output nodes": len(outputs),
        "outputs": sum(len(o) if isinstance(o, (list, tuple)) else 1 for o in outputs),
    }


def _check_interface(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what, wanted in before.items():
        if after[what] != wanted:
            raise ValueError(
                f"the pass changed the {what} of the graph from {wanted} to {after[what]}"
            )


def _check(node: Node) -> None:
    """Raise if *node* is an invalid call of an IR op."""
    call = ir_call(node)  # validates the arguments
    for given in node.all_input_nodes if call else ():
        value = given.meta.get("val")
        if not isinstance(value, _VALUES):
            raise TypeError(f"meta['val'] of {given.name} is a {type(value).__name__}")


def _complete(node: Node) -> None:
    """Compute the fake value of a node that does not have one."""
    if node.op == "call_function" and "val" not in node.meta:
        tensors = [tensor for given in node.all_input_nodes for tensor in tensors_of(given)]
        node.meta["val"] = computed_fake(node, compat.fake_mode_of(tensors))
