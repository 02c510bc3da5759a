"""Sequence parallelism: shard row-wise ops that follow an all-reduce over tokens.

After an ``all_reduce``, every rank has all tokens and computes the same norms. If
:mod:`opweave.compile.sharding` decides that it pays, the tokens stay sharded until a node needs
all of them:

=============================  =============================================================
node                           is replaced with
=============================  =============================================================
``all_reduce``                 ``reduce_scatter``, with the rows padded to a multiple of the
                               number of ranks if necessary
row-wise node                  the same node on the rank's rows
unsharded row operand          a view of the rank's rows
sizes of a reshape             the same sizes with the rank's number of rows
use of all rows                ``all_gather`` without the padding; 8-bit floats are sent as bytes
unused ``all_reduce``          nothing (fusion leaves some, and dead code elimination keeps them)
=============================  =============================================================

The graph is only changed if the number of transferred bytes does not grow, apart from padding of
less than one row per rank.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile.collectives import WAIT, collective, count_collectives, overload
from opweave.compile.context import Context
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import computed_fake, fake_of, operands
from opweave.compile.rowwise import RESHAPES, is_view
from opweave.compile.sharding import Region, Sharding

aten = torch.ops.aten


def shard_tokens(info: GraphInfo, context: Context) -> None:
    """Shard the tokens over the ranks between collectives, where that pays."""
    if not any(collective(node) == "all_reduce" for node in info.nodes):
        return
    graph = info.graph
    _drop_unused(info)
    sharding = Sharding(info.current(), context.tracer)
    for region in sharding.regions():
        reason = region.refusal
        if reason:
            sharding.drop([*region.sources, *region.nodes])
        context.notes.append(_refused(region, reason, sharding) if reason else _done(region))
        if not reason:
            _Rewriter(graph, region, sharding).run()
    context.report.collectives = count_collectives(graph)


def _drop_unused(info: GraphInfo) -> None:
    for node in reversed(info.nodes):
        if not node.users and collective(node) in (WAIT, "all_reduce"):
            info.graph.erase_node(node)


def _refused(region: Region, reason: str, sharding: Sharding) -> str:
    near = [
        f"{user.name}: {sharding.obstacles[user]}"
        for source in region.sources
        for user in source.users
        if user in sharding.obstacles
    ]
    reduced = [source.all_input_nodes[0] for source in region.sources]
    return f"{_names(reduced)} left: {'; '.join([reason, *near])}"


def _done(region: Region) -> str:
    ops = _names([node for node in region.nodes if not is_view(node)])
    return (
        f"{len(region.sources)} all_reduce become {len(region.sources)} reduce_scatter and "
        f"{len(region.gathered)} all_gather over {region.shard.group.size} ranks, around {ops}"
    )


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.name for node in nodes)


class _Rewriter:
    """Rewrites one region, node by node in the order of the graph."""

    def __init__(self, graph: Graph, region: Region, sharding: Sharding) -> None:
        self._graph, self._region, self._sharding = graph, region, sharding
        self._group, self._is_even = region.shard.group, region.shard.is_even
        self._mode = fake_of(region.sources[0]).fake_mode
        self._origin = region.sources[0].all_input_nodes[0]
        self._own: dict[Node, Node] = {}
        with graph.inserting_before(self._origin):
            self._tokens, self._rows, self._padding = self._sizes()

    def run(self) -> None:
        nodes = [*self._region.sources, *self._region.nodes]
        for node in sorted(nodes, key=self._sharding.order.__getitem__):
            self._origin = node
            users, whole = self._sharding.whole_users(node), fake_of(node)
            part = self._scatter(node) if node in self._region.sources else self._divide(node)
            if users:
                gathered = self._gather(part, whole)
                for user in users:
                    user.replace_input_with(node, gathered)
            if part is not node:
                self._erase(node, part)

    def _sizes(self) -> tuple[Any, Any, Any]:
        """Return the numbers of tokens, rows per rank and padding rows, as numbers or nodes."""
        tokens, ranks = self._region.shard.tokens, self._group.size
        if isinstance(tokens, int):
            rows = -(-tokens // ranks)
            return tokens, rows, rows * ranks - tokens
        size = self._emit(aten.sym_size.int, self._origin.all_input_nodes[0], 0)
        if self._is_even:
            return size, self._emit(operator.floordiv, size, ranks), 0
        more = self._emit(operator.add, size, ranks - 1)
        share = self._emit(operator.floordiv, more, ranks)
        total = self._emit(operator.mul, share, ranks)
        return size, share, self._emit(operator.sub, total, size)

    def _scatter(self, wait: Node) -> Node:
        """Replace the all-reduce that *wait* waits for with a reduce-scatter."""
        reduced = wait.all_input_nodes[0]
        value, how, name = operands(reduced)
        with self._graph.inserting_before(reduced):
            padded = self._padded(value)
            target = overload("reduce_scatter_tensor")
            scattered = self._emit(target, padded, how, self._group.size, name)
        with self._graph.inserting_before(wait):
            return self._emit(overload("wait_tensor"), scattered)

    def _divide(self, node: Node) -> Node:
        """Change *node* to compute this rank's rows."""
        whole = self._sharding.rows[node] - self._sharding.shards.keys()
        with self._graph.inserting_before(node):
            for operand in node.all_input_nodes:
                if operand in whole:
                    node.replace_input_with(operand, self._own_rows(operand))
        if node.target in RESHAPES:
            if node.target is not aten.expand.default:
                node.target = aten.reshape.default  # the shard may have other strides
            node.args = (node.args[0], [self._rows, *fake_of(node).shape[1:]])
            node.kwargs = {}
        for stale in ("tensor_meta", "eager_input_vals"):
            node.meta.pop(stale, None)
        node.meta["val"] = computed_fake(node, self._mode)
        return node

    def _own_rows(self, whole: Node) -> Node:
        """Return this rank's rows of a tensor that is the same on every rank."""
        if whole not in self._own:
            shape = [self._group.size, self._rows, *fake_of(whole).shape[1:]]
            blocks = self._emit(aten.reshape.default, self._padded(whole), shape)
            self._own[whole] = self._emit(aten.select.int, blocks, 0, self._group.rank)
        return self._own[whole]

    def _gather(self, part: Node, whole: Tensor) -> Node:
        """Return the rows of all ranks, without padding."""
        small_float = part.meta["val"].is_floating_point() and whole.element_size() == 1
        with self._graph.inserting_before(part.next):
            sent = self._emit(aten.view.dtype, part, torch.uint8) if small_float else part
            target = overload("all_gather_into_tensor")
            gathered = self._emit(target, sent, self._group.size, self._group.name)
            gathered = self._emit(overload("wait_tensor"), gathered)
            if small_float:
                gathered = self._emit(aten.view.dtype, gathered, whole.dtype)
            if self._padding != 0:
                gathered = self._emit(aten.slice.Tensor, gathered, 0, 0, self._tokens, value=whole)
        return gathered

    def _padded(self, value: Any) -> Any:
        if self._padding == 0:
            return value
        before = [0, 0] * (fake_of(value).ndim - 1)
        return self._emit(aten.constant_pad_nd.default, value, [*before, 0, self._padding])

    def _erase(self, wait: Node, part: Node) -> None:
        reduced = wait.all_input_nodes[0]
        wait.replace_all_uses_with(part)
        self._graph.erase_node(wait)
        self._graph.erase_node(reduced)

    def _emit(self, target: Any, *args: Any, value: Any = None) -> Node:
        node = self._graph.call_function(target, args)
        node.meta["val"] = computed_fake(node, self._mode) if value is None else value
        if self._origin.stack_trace:
            node.meta["stack_trace"] = self._origin.stack_trace
        return node
