"""Sharding analysis for sequence parallelism: which nodes can be sharded over tokens.

Each rank of a group gets some rows of the result of an ``all_reduce``, and computes the row-wise
nodes that follow for these rows only. Other operands must be replicated, that is, the same on every
rank:

============================  ==================================================================
replicated                    graph inputs, by convention; results of all-reduce, all-gather and
                              broadcast; row-wise nodes, lookups and new tensors computed from
                              replicated operands
assumed to differ by rank     all other results (matrix products, attention, ...), because their
                              weights may differ
never sharded                 nodes from which only row-wise nodes lead to another collective:
                              they are partial sums, which differ even if they look replicated
============================  ==================================================================
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from opweave.compile.collectives import WAIT, Group, collective, find_group
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import fake_of, ir_call, operands, tensors_of
from opweave.compile.rowwise import Size, is_view, keeps_rows, known_equal, row_operands
from opweave.compile.tracing import Tracer

aten = torch.ops.aten
# Tokens per rank. With fewer, much of the traffic is padding. Besides, compilers specialize on a
# size of 1, so a rank must have more rows, and "fewer than this" must include more than one size,
# or they would specialize on that size.
MIN_ROWS = 3
_PER_BYTE = 1 << 20  # price per byte; a collective costs 1, so fewer collectives break ties
_REPLICATING = {"all_reduce", "all_gather", "broadcast"}
_MADE_OF_INPUTS = {
    aten.arange.default,
    aten.arange.start_step,
    aten.embedding.default,
    aten.empty.memory_format,
    aten.full.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
}
_LOOKUPS = {"embedding"}  # IR ops


@dataclass(eq=False)
class Shard:
    """A number of rows that is sharded over the ranks of a group."""

    group: Group
    tokens: Size

    @property
    def is_even(self) -> bool:
        """Whether the number of rows is always a multiple of the number of ranks."""
        return known_equal(self.tokens % self.group.size, 0)


@dataclass
class Region:
    """A connected set of sharded nodes.

    Attributes:
        shard: how their rows are sharded.
        sources: the waits of the ``all_reduce`` nodes where the region begins.
        nodes: the other nodes, in graph order.
        gathered: the nodes whose results must be gathered.
    """

    shard: Shard
    sources: list[Node]
    nodes: list[Node]
    gathered: list[Node]

    @property
    def refusal(self) -> str:
        """Why the region should not be sharded, or an empty string.

        For a dynamic number of tokens, this adds a guard on the minimum number of tokens.
        """
        if all(map(is_view, self.nodes)):
            return "no row-wise op follows that could be sharded"
        if guard_or_false(self.shard.tokens >= MIN_ROWS * self.shard.group.size):
            return ""
        return f"fewer than {MIN_ROWS} tokens for each of {self.shard.group.size} ranks"


class Sharding:
    """The sharded nodes of a graph, and the operands of which each needs only its rows."""

    def __init__(self, info: GraphInfo, tracer: Tracer) -> None:
        self.shards: dict[Node, Shard] = {}  # in graph order
        self.rows: dict[Node, set[Node]] = {}  # the operands of a node that have rows
        self.obstacles: dict[Node, str] = {}
        self._tracer = tracer
        self.order = info.order
        self._summed = _summed(info)
        self._replicated: set[Node] = set()
        for node in info.nodes:
            if self._is_replicated(node):
                self._replicated.add(node)
            shard = self._source(node) or self._spread(node)
            if shard is not None:
                self.shards[node] = shard
        self._gather_early()

    def regions(self) -> list[Region]:
        """Return the connected sets of sharded nodes."""
        found, left = [], dict(self.shards)
        while left:
            nodes = self._connected(next(iter(left)))
            for node in nodes:
                del left[node]
            nodes.sort(key=self.order.__getitem__)
            sources = [node for node in nodes if node not in self.rows]
            others = [node for node in nodes if node in self.rows]
            gathered = [node for node in nodes if self.whole_users(node)]
            found.append(Region(self.shards[nodes[0]], sources, others, gathered))
        return found

    def whole_users(self, node: Node) -> list[Node]:
        """Return the users that need all rows of *node*."""
        return [user for user in node.users if user not in self.shards]

    def drop(self, nodes: Iterable[Node]) -> None:
        """Do not shard *nodes*."""
        for node in nodes:
            del self.shards[node]

    def _source(self, node: Node) -> Shard | None:
        if collective(node) != WAIT:
            return None
        reduced = node.all_input_nodes[0]
        if collective(reduced) != "all_reduce" or len(reduced.users) > 1:
            return None
        summand, how, name = operands(reduced)
        value, group = fake_of(node), find_group(name)
        if group is None or group.size < 2 or how not in ("sum", "avg"):
            return None
        if not _has_tokens(value) or not fake_of(summand).is_contiguous():
            return None
        for shard in self.shards.values():
            if shard.group == group and known_equal(shard.tokens, value.shape[0]):
                return shard
        return Shard(group, value.shape[0])

    def _spread(self, node: Node) -> Shard | None:
        """Return the shard of *node*, from those of its operands."""
        found = {self.shards[n] for n in node.all_input_nodes if n in self.shards}
        if len(found) != 1 or node in self._summed or node.op != "call_function":
            return None
        (shard,) = found
        rows = row_operands(node, shard.tokens, self._tracer)
        if rows is None or _is_used_as_tuple(node):
            return None
        for operand in node.all_input_nodes:
            if node.target is aten.copy.default and operand is node.args[0]:
                continue  # its values are overwritten
            if operand in self.shards and operand not in rows:
                return None
            if operand not in self.shards and operand not in self._replicated:
                self.obstacles[node] = f"{operand.name} may differ between ranks"
                return None
        self.rows[node] = rows
        return shard

    def _is_replicated(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        if collective(node) == WAIT:
            return collective(node.all_input_nodes[0]) in _REPLICATING
        if not tensors_of(node):
            return node.op == "call_function"  # a size
        if node in self._summed or not self._replicated.issuperset(node.all_input_nodes):
            return False
        call = ir_call(node)
        if call is not None and call.op.name in _LOOKUPS:
            return True
        return node.target in _MADE_OF_INPUTS or keeps_rows(node)

    def _gather_early(self) -> None:
        """Choose the nodes after which to gather by a minimum cut, and unshard the nodes behind.

        On ties, as many nodes as possible stay sharded. Gathering right after the sources is always
        possible, and transfers as many bytes as ``all_reduce``.
        """
        import networkx  # type: ignore[import-untyped]  # slow to import; a dependency of torch

        flow = self._flow(networkx.DiGraph())
        _, (_, whole) = networkx.minimum_cut(flow, "sharded", "whole")  # "whole" is minimal
        early = [node for node in self.shards if node in whole]
        for node in early:
            self.obstacles[node] = "its result would cost more to gather"
        self.drop(early)

    def _flow(self, flow: Any) -> Any:
        """Return a flow network from "sharded" to "whole", in which a cut is a set of gathers.

        The edge from node to (node,) is cut if the node is sharded and gathered. Edges without a
        capacity cannot be cut: they force the nodes of a connected region onto a consistent side.
        """
        flow.add_nodes_from(["sharded", "whole"])
        for node in self.shards:
            after: Any = (node,) if isinstance(fake_of(node), Tensor) else node
            if after != node:
                flow.add_edge(node, after, **_price(node))
            if node not in self.rows:
                flow.add_edge("sharded", node)
            if self.whole_users(node):
                flow.add_edge(after, "whole")
            for user in node.users.keys() & self.shards.keys():
                flow.add_edge(after, user)
                flow.add_edge(user, node)
        return flow

    def _connected(self, start: Node) -> list[Node]:
        found, waiting = {start: None}, [start]
        while waiting:
            node = waiting.pop()
            before = self.rows.get(node, set())
            for other in [*before, *node.users]:
                linked = other in before or node in self.rows.get(other, set())
                if linked and other in self.shards and other not in found:
                    found[other] = None
                    waiting.append(other)
        return list(found)


def _is_used_as_tuple(node: Node) -> bool:
    parts = all(user.target is operator.getitem for user in node.users)
    return not isinstance(fake_of(node), Tensor) and not parts


def _summed(info: GraphInfo) -> set[Node]:
    """Return the nodes that lead to a collective through row-wise nodes only."""
    found: set[Node] = set()
    for node in reversed(info.nodes):
        for user in node.users:
            into = collective(user) not in ("", WAIT)
            if into or (user in found and (keeps_rows(user) or collective(user) == WAIT)):
                found.add(node)
    return found


def _has_tokens(value: Tensor) -> bool:
    return value.ndim > 1 and all(isinstance(size, int) and size for size in value.shape[1:])


def _price(node: Node) -> dict[str, int]:
    """Return the capacity of gathering *node*; empty if gathering would change its layout."""
    value = fake_of(node)
    if not all(isinstance(size, int) for size in value.shape[1:]) or not value.is_contiguous():
        return {}
    row_bytes = math.prod(value.shape[1:]) * value.element_size()
    return {"capacity": row_bytes * _PER_BYTE + 1}
