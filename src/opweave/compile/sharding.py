"""How far "sharded over tokens" reaches in a graph, and where it pays.

Every rank of a group has some of the rows of what an ``all_reduce`` gives, and computes what
follows from them, row by row. Other operands must be the same on every rank, or the ranks would
compute the rows of different results:

=======================  =======================================================================
the same on every rank   inputs of the graph, by convention; what collectives give to all; what
                         row-wise nodes, lookups and new tensors make of those
taken to differ          results of everything else (matrix products, attention, ...), whose
                         weights may be one rank's own
never sharded            what leads to another collective by row-wise nodes only: such a sum is
                         made of parts that differ, whatever they look like
=======================  =======================================================================
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from opweave.compile.collectives import WAIT, Group, collective, find_group
from opweave.compile.nodes import fake_of, ir_call, tensors_of
from opweave.compile.patterns import operands
from opweave.compile.rowwise import Size, is_view, keeps_rows, known_equal, row_operands
from opweave.compile.tracing import Tracer

aten = torch.ops.aten
# With fewer, padding is much of what is moved. Also, compilers treat sizes of 1 as special, which a
# rank's rows must not be; and "fewer" must hold more than one number, or it is a constant to them.
MIN_ROWS = 3
_PER_BYTE = 1 << 20  # of the same bytes, fewer collectives are better
_SAME_EVERYWHERE = {"all_reduce", "all_gather", "broadcast"}
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
_LOOKUPS = {"embedding"}  # ops of the IR


@dataclass(eq=False)
class Shard:
    """The rows of one size that the ranks of a group divide among them."""

    group: Group
    tokens: Size

    @property
    def is_even(self) -> bool:
        """Whether every rank gets as many rows, whatever their number turns out to be."""
        return known_equal(self.tokens % self.group.size, 0)


@dataclass
class Region:
    """Sharded nodes that hang together.

    Attributes:
        shard: what their rows are divided into.
        sources: the waits for the ``all_reduce`` nodes where it begins.
        nodes: the others, in the order of the graph.
        gathered: those whose results someone needs whole.
    """

    shard: Shard
    sources: list[Node]
    nodes: list[Node]
    gathered: list[Node]

    @property
    def refusal(self) -> str:
        """Why the region is better left alone, or an empty string.

        Where the number of tokens varies, asking whether there are enough makes the graph one for
        many tokens, or for few.
        """
        if all(map(is_view, self.nodes)):
            return "no row-wise op follows that could be sharded"
        if guard_or_false(self.shard.tokens >= MIN_ROWS * self.shard.group.size):
            return ""
        return f"fewer than {MIN_ROWS} tokens for each of {self.shard.group.size} ranks"


class Sharding:
    """Which nodes of *graph* are sharded, and what each needs of its operands."""

    def __init__(self, graph: Graph, tracer: Tracer) -> None:
        self.shards: dict[Node, Shard] = {}  # in the order of the graph
        self.rows: dict[Node, set[Node]] = {}  # the operands of a node that have rows
        self.obstacles: dict[Node, str] = {}
        self._tracer = tracer
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._summed = _summed(graph)
        self._same: set[Node] = set()  # on every rank
        for node in graph.nodes:
            if self._is_same(node):
                self._same.add(node)
            shard = self._source(node) or self._spread(node)
            if shard is not None:
                self.shards[node] = shard
        self._gather_early()

    def regions(self) -> list[Region]:
        """Return the sharded nodes by what hangs together."""
        found, left = [], dict(self.shards)
        while left:
            nodes = self._connected(next(iter(left)))
            for node in nodes:
                del left[node]
            nodes.sort(key=self._order.__getitem__)
            sources = [node for node in nodes if node not in self.rows]
            others = [node for node in nodes if node in self.rows]
            gathered = [node for node in nodes if self.whole_users(node)]
            found.append(Region(self.shards[nodes[0]], sources, others, gathered))
        return found

    def whole_users(self, node: Node) -> list[Node]:
        """Return who needs all rows of *node*."""
        return [user for user in node.users if user not in self.shards]

    def drop(self, nodes: Iterable[Node]) -> None:
        """Leave *nodes* as they are."""
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
        """Return how *node* is sharded if its operands are."""
        found = {self.shards[n] for n in node.all_input_nodes if n in self.shards}
        if len(found) != 1 or node in self._summed or node.op != "call_function":
            return None
        (shard,) = found
        rows = row_operands(node, shard.tokens, self._tracer)
        if rows is None or _is_used_as_tuple(node):
            return None
        for operand in node.all_input_nodes:
            if node.target is aten.copy.default and operand is node.args[0]:
                continue  # whatever is in there is overwritten
            if operand in self.shards and operand not in rows:
                return None
            if operand not in self.shards and operand not in self._same:
                self.obstacles[node] = f"{operand.name} may differ between ranks"
                return None
        self.rows[node] = rows
        return shard

    def _is_same(self, node: Node) -> bool:
        """Whether the results of *node* are the same on every rank."""
        if node.op in ("placeholder", "get_attr"):
            return True
        if collective(node) == WAIT:
            return collective(node.all_input_nodes[0]) in _SAME_EVERYWHERE
        if not tensors_of(node):
            return node.op == "call_function"  # a size
        if node in self._summed or not self._same.issuperset(node.all_input_nodes):
            return False
        call = ir_call(node)
        if call is not None and call.op.name in _LOOKUPS:
            return True
        return node.target in _MADE_OF_INPUTS or keeps_rows(node)

    def _gather_early(self) -> None:
        """Make whole what is cheaper to gather before than after: a minimal cut.

        Where it moves as much either way, as much as possible stays sharded. Gathering right after
        the sources is always possible, and moves as much as ``all_reduce``.
        """
        import networkx  # type: ignore[import-untyped]  # comes with torch, and takes a while

        flow = self._flow(networkx.DiGraph())
        _, (_, whole) = networkx.minimum_cut(flow, "sharded", "whole")  # the smallest such part
        early = [node for node in self.shards if node in whole]
        for node in early:
            self.obstacles[node] = "its result would cost more to gather"
        self.drop(early)

    def _flow(self, flow: Any) -> Any:
        """Return a network from "sharded" to "whole" in which a cut is a choice of gathers.

        The edge from a node to (node,) is cut if the node is sharded and gathered. An edge without
        a capacity cannot be: what is behind it is whole only if what is in front of it is.
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


def _summed(graph: Graph) -> set[Node]:
    """Return the nodes that lead to a collective by row-wise nodes only."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        for user in node.users:
            into = collective(user) not in ("", WAIT)
            if into or (user in found and (keeps_rows(user) or collective(user) == WAIT)):
                found.add(node)
    return found


def _has_tokens(value: Tensor) -> bool:
    return value.ndim > 1 and all(isinstance(size, int) and size for size in value.shape[1:])


def _price(node: Node) -> dict[str, int]:
    """Return what it costs to gather *node*; nothing if it cannot be gathered into what it was."""
    value = fake_of(node)
    if not all(isinstance(size, int) for size in value.shape[1:]) or not value.is_contiguous():
        return {}
    row_bytes = math.prod(value.shape[1:]) * value.element_size()
    return {"capacity": row_bytes * _PER_BYTE + 1}
