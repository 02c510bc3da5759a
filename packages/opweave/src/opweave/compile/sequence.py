"""Sequence parallelism: shard row-wise ops that follow an all-reduce over tokens."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import SymInt, Tensor, distributed
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from opweave.compile import compat, fingerprint
from opweave.compile.graph import (
    VIEWS,
    GraphInfo,
    IrCall,
    computed_fake,
    fake_of,
    has_fake,
    ir_call,
    operands,
    tensors_of,
)
from opweave.compile.plan import Context
from opweave.compile.tracing import Tracer, arguments
from opweave.ir.priority import NATIVE
from opweave.ir.rules import ROWWISE

# Functional collectives in graphs, and their process groups.


_NAMESPACE = "_c10d_functional"
_SUFFIX = re.compile(r"(_tensor|_into_tensor)$")  # reduce_scatter_tensor, all_gather_into_tensor
WAIT = "wait_tensor"


@dataclass(frozen=True)
class Group:
    """A process group, seen from this process.

    Attributes:
        name: its name in graphs.
        size: the number of ranks.
        rank: the rank of this process.
    """

    name: Any
    size: int
    rank: int


def find_group(name: Any) -> Group | None:
    """Return the process group *name*, or None if it does not exist or excludes this process."""
    try:
        group = cast("Any", distributed.distributed_c10d)._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError):
        return None
    rank = distributed.get_rank(group)
    return Group(name, distributed.get_world_size(group), rank) if rank >= 0 else None


def collective(node: Node) -> str:
    """Return the functional collective that *node* calls, or an empty string.

    ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` are called ``reduce_scatter`` and
    ``all_gather``; the wait is ``wait_tensor``.
    """
    target = node.target
    if not isinstance(target, compat.OpOverload) or target.namespace != _NAMESPACE:
        return ""
    name = str(target).split(".")[1]
    return name if name == WAIT else _SUFFIX.sub("", name)


def count_collectives(graph: Graph) -> dict[str, int]:
    """Return the number of collectives in *graph* by name, without waits."""
    names = Counter(filter(None, map(collective, graph.nodes)))
    del names[WAIT]
    return dict(sorted(names.items()))


def overload(name: str) -> Any:
    """Return the op ``torch.ops._c10d_functional.<name>``."""
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _groups() -> str:
    """Return every group, its size and this process's rank, which a graph may be specialized to."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    return repr(
        sorted(
            (str(name), distributed.get_world_size(group), distributed.get_rank(group))
            for group, name in compat.process_groups().items()
        )
    )


fingerprint.contribute(_groups)


# Row-wise analysis: which nodes compute each row of the result from the same row of the operands.
#
# A row is an index of dimension 0, that is, a token. A row-wise node applied to some of the rows
# returns those rows of the full result.
#
# ==========================  ====================================================================
# node                        is row-wise if
# ==========================  ====================================================================
# IR op                       its native implementation has the trait ``rowwise``, or its trace
#                             contains only row-wise nodes (``static_quant_fp8`` with one scale)
# pointwise aten op           each operand has a row per token, or is broadcast to all tokens
# reduction, sort, softmax    it is not along dimension 0
# view, slice, concatenation  dimension 0 does not change
# ==========================  ====================================================================


aten = torch.ops.aten
Size = int | SymInt

# Operators that work along the dimensions in their argument ``dim``.
_REDUCTIONS = {
    aten._log_softmax.default, aten._softmax.default, aten.all.dim, aten.amax.default,
    aten.amin.default, aten.any.dim, aten.argmax.default, aten.argmin.default,
    aten.cumsum.default, aten.logsumexp.default, aten.mean.dim, aten.sort.default,
    aten.std.correction, aten.sum.dim_IntList, aten.topk.default, aten.var.correction,
    aten.var_mean.correction,
}  # fmt: skip
# Operators that select, split or join parts of tensors along their argument ``dim``.
_PARTS = {
    aten.cat.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.dim, aten.squeeze.dims, aten.unbind.int,
}  # fmt: skip
# Operators that take the sizes of their result.
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default,
}  # fmt: skip
# Pointwise operators that torch does not tag as pointwise.
_POINTWISE = {
    aten._to_copy.default, aten.alias.default, aten.copy.default, aten.full_like.default,
    aten.ones_like.default, aten.zeros_like.default,
}  # fmt: skip


def row_operands(node: Node, tokens: Size, tracer: Tracer) -> set[Node] | None:
    """Return the operands of *node* that have a row for each row of the result.

    Args:
        node: the node.
        tokens: the number of rows.
        tracer: traces ops without the trait, which may be row-wise for these arguments.

    Returns:
        The operands, or None if *node* is not row-wise. All rows of every other operand are needed.
    """
    results = tensors_of(node)
    if not results or not all(_has_rows(result, tokens) for result in results):
        return None
    if not all(map(has_fake, node.all_input_nodes)):
        return None
    if node.target is operator.getitem:
        return set(node.all_input_nodes)
    call = ir_call(node)
    if call is not None:
        rows = _rows_of_arguments(call, tokens)
        rowwise = ROWWISE in call.op.impls[NATIVE].traits
        if rows is None or rowwise or _is_rowwise_inside(call, rows, tokens, tracer):
            return rows
        return None
    if node.target in _KEEPS_ROWS:
        return _all_rows(node, tokens) if _KEEPS_ROWS[node.target](node) else None
    return _pointwise(node, tokens) if _is_pointwise(node) else None


def keeps_rows(node: Node) -> bool:
    """Return whether *node* may be row-wise, depending on its arguments."""
    call = ir_call(node)
    if call is not None:
        return ROWWISE in call.op.impls[NATIVE].traits
    return node.target is operator.getitem or node.target in _KEEPS_ROWS or _is_pointwise(node)


def is_view(node: Node) -> bool:
    """Return whether *node* only rearranges its operands: a view, slice or concatenation."""
    return node.target in _VIEWS


def known_equal(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal for all values of the dynamic sizes."""
    return a is b or bool(statically_known_true(a == b))


def _along(node: Node) -> bool:
    names = [a.name for a in cast("compat.OpOverload", node.target)._schema.arguments]
    dims = operands(node)[names.index("dim")]
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return bool(dims) and not any(dim in (0, -_tensors(node)[0].ndim) for dim in dims)


def _permute(node: Node) -> bool:
    dims: Any = node.args[1]
    return dims[0] in (0, -len(dims))


def _padding(node: Node) -> bool:
    amounts: Any = node.args[1]
    ndim: int = fake_of(node).ndim
    return len(amounts) < 2 * ndim


def _reshape(node: Node) -> bool:
    result = fake_of(node)
    if node.target is aten.expand.default and _tensors(node)[0].ndim != result.ndim:
        return False
    return all(isinstance(size, int) for size in result.shape[1:])


def _pointwise(node: Node, tokens: Size) -> set[Node] | None:
    """Return the operands with a row per token, if all others are broadcast to every token."""
    rows, count = set(), fake_of(node).ndim
    for operand in node.all_input_nodes:
        value = fake_of(operand)
        if not isinstance(value, Tensor) or value.ndim < count or known_equal(value.shape[0], 1):
            continue
        if not known_equal(value.shape[0], tokens):
            return None
        rows.add(operand)
    return rows


def _all_rows(node: Node, tokens: Size) -> set[Node] | None:
    nodes = {n for n in node.all_input_nodes if isinstance(fake_of(n), Tensor)}
    return nodes if all(_has_rows(fake_of(n), tokens) for n in nodes) else None


def _rows_of_arguments(call: IrCall, tokens: Size) -> set[Node] | None:
    """Return the tensor arguments with a row per token: the activations, and others like them.

    Arguments with fewer dimensions, or with a first dimension of 1, apply to all rows.
    """
    rows: set[Node] = set()
    first = call.fakes[call.op.activation_indices[0]] if call.op.activations else None
    if first is None or first.ndim < 2 or any(p.is_tensor_list for p in call.op.schema.params):
        return None
    for param, node, fake in zip(call.op.schema.params, call.values, call.fakes, strict=True):
        if not isinstance(fake, Tensor):
            continue
        for_all = fake.ndim < first.ndim or known_equal(fake.shape[0], 1)
        if param.name not in call.op.activations and for_all:
            continue
        if fake.ndim != first.ndim or not _has_rows(fake, tokens):
            return None
        rows.add(node)
    return rows


def _is_rowwise_inside(call: IrCall, rows: set[Node], tokens: Size, tracer: Tracer) -> bool:
    """Return whether the op's native implementation traces to row-wise nodes only."""
    trace = tracer.trace(call.op.impls[NATIVE], call.fakes)
    if trace.failure or trace.mutates:
        return False
    operands_of_call = iter(arguments(call))
    inside: set[Node] = set()
    for node in trace.info.nodes:
        sharded = inside.intersection(node.all_input_nodes)
        if node.op == "placeholder":
            inside |= {node} if next(operands_of_call) in rows else set()
        elif node.op == "output":
            return sharded == set(node.all_input_nodes)
        elif sharded:
            needed = row_operands(node, tokens, tracer)
            if needed is None or not sharded <= needed:
                return False
            inside.add(node)
    return False


def _is_pointwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, compat.OpOverload) or compat.is_mutable(target):
        return False
    is_pointwise = target in _POINTWISE or torch.Tag.pointwise in target.tags
    return is_pointwise and not compat.draws_random_numbers(target)


# Whether an operator keeps dimension 0; pointwise operators always do.
_KEEPS_ROWS: dict[object, Callable[[Node], bool]] = {
    **dict.fromkeys(_REDUCTIONS | _PARTS, _along),
    **dict.fromkeys(_RESHAPES, _reshape),
    aten.permute.default: _permute,
    aten.transpose.int: lambda node: not {0, -fake_of(node).ndim}.intersection(node.args[1:]),
    aten.constant_pad_nd.default: _padding,
    aten.unsqueeze.default: lambda node: node.args[1] not in (0, -fake_of(node).ndim),
}
_VIEWS: set[object] = {*VIEWS, *_PARTS, *_RESHAPES, operator.getitem}
_VIEWS |= {aten.permute.default, aten.transpose.int, aten.copy.default}


def _has_rows(value: Tensor, tokens: Size) -> bool:
    return value.ndim > 0 and known_equal(value.shape[0], tokens)


def _tensors(node: Node) -> list[Tensor]:
    return [fake for n in node.all_input_nodes if isinstance(fake := fake_of(n), Tensor)]


# Sharding analysis for sequence parallelism: which nodes can be sharded over tokens.
#
# Each rank of a group gets some rows of the result of an ``all_reduce``, and computes the
# row-wise nodes that follow for these rows only. Other operands must be replicated, that is, the
# same on every rank:
#
# ============================  ==================================================================
# replicated                    graph inputs, by convention; results of all-reduce, all-gather and
#                               broadcast; row-wise nodes, lookups and new tensors computed from
#                               replicated operands
# assumed to differ by rank     all other results (matrix products, attention, ...), because their
#                               weights may differ
# never sharded                 nodes from which only row-wise nodes lead to another collective:
#                               they are partial sums, which differ even if they look replicated
# ============================  ==================================================================


# Tokens per rank. With fewer, much of the traffic is padding. Besides, compilers specialize on a
# size of 1, so a rank must have more rows, and "fewer than this" must include more than one size,
# or they would specialize on that size.
MIN_ROWS = 3
_PER_BYTE = 1 << 20  # price per byte; a collective costs 1, so fewer collectives break ties
_REPLICATING = {"all_reduce", "all_gather", "broadcast"}
_MADE_OF_INPUTS = {
    aten.arange.default, aten.arange.start_step, aten.embedding.default,
    aten.empty.memory_format, aten.full.default, aten.index.Tensor, aten.index_select.default,
    aten.ones.default, aten.scalar_tensor.default, aten.zeros.default,
}  # fmt: skip
_LOOKUPS = {"embedding"}  # IR ops


@dataclass(eq=False)
class Shard:
    """A number of rows that is sharded over the ranks of a group."""

    group: Group
    tokens: Size


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
        import networkx  # type: ignore[import-untyped]  # slow to import; a dependency of torch

        graph = networkx.Graph()
        graph.add_nodes_from(self.shards)
        rows = [(node, operand) for node in self.shards for operand in self.rows.get(node, ())]
        graph.add_edges_from(edge for edge in rows if edge[1] in self.shards)
        regions = []
        for component in networkx.connected_components(graph):
            nodes = sorted(component, key=self.order.__getitem__)
            sources = [node for node in nodes if node not in self.rows]
            others = [node for node in nodes if node in self.rows]
            gathered = [node for node in nodes if self.whole_users(node)]
            regions.append(Region(self.shards[nodes[0]], sources, others, gathered))
        return regions

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
        shards_of_operands = {self.shards[n] for n in node.all_input_nodes if n in self.shards}
        if len(shards_of_operands) != 1 or node in self._summed or node.op != "call_function":
            return None
        (shard,) = shards_of_operands
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
        import networkx

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


def _is_used_as_tuple(node: Node) -> bool:
    parts = all(user.target is operator.getitem for user in node.users)
    return not isinstance(fake_of(node), Tensor) and not parts


def _summed(info: GraphInfo) -> set[Node]:
    """Return the nodes that lead to a collective through row-wise nodes only."""
    summed: set[Node] = set()
    for node in reversed(info.nodes):
        for user in node.users:
            into = collective(user) not in ("", WAIT)
            if into or (user in summed and (keeps_rows(user) or collective(user) == WAIT)):
                summed.add(node)
    return summed


def _has_tokens(value: Tensor) -> bool:
    return value.ndim > 1 and all(isinstance(size, int) and size for size in value.shape[1:])


def _price(node: Node) -> dict[str, int]:
    """Return the capacity of gathering *node*; empty if gathering would change its layout."""
    value = fake_of(node)
    if not all(isinstance(size, int) for size in value.shape[1:]) or not value.is_contiguous():
        return {}
    row_bytes = math.prod(value.shape[1:]) * value.element_size()
    return {"capacity": row_bytes * _PER_BYTE + 1}


# Sequence parallelism: shard row-wise ops that follow an all-reduce over tokens.
#
# After an ``all_reduce``, every rank has all tokens and computes the same norms. If
# the analysis above decides that it pays, the tokens stay sharded until a node
# needs all of them:
#
# =============================  =============================================================
# node                           is replaced with
# =============================  =============================================================
# ``all_reduce``                 ``reduce_scatter``, with the rows padded to a multiple of the
#                                number of ranks if necessary
# row-wise node                  the same node on the rank's rows
# unsharded row operand          a view of the rank's rows
# sizes of a reshape             the same sizes with the rank's number of rows
# use of all rows                ``all_gather`` without the padding; 8-bit floats are sent as bytes
# unused ``all_reduce``          nothing (fusion leaves some, and dead code elimination keeps them)
# =============================  =============================================================
#
# The graph is only changed if the number of transferred bytes does not grow, apart from padding
# of less than one row per rank.


def shard_tokens(info: GraphInfo, context: Context) -> None:
    """Shard the tokens over the ranks between collectives, where that pays."""
    if not any(collective(node) == "all_reduce" for node in info.nodes):
        return
    graph = info.graph
    for node in reversed(info.nodes):  # fusion leaves unused collectives
        if not node.users and collective(node) in (WAIT, "all_reduce"):
            graph.erase_node(node)
    sharding = Sharding(info.current(), context.tracer)
    for region in sharding.regions():
        reason = region.refusal
        if reason:
            sharding.drop([*region.sources, *region.nodes])
        context.notes.append(_refused(region, reason, sharding) if reason else _done(region))
        if not reason:
            _Rewriter(graph, region, sharding).run()
    context.report.collectives = count_collectives(graph)


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
        self._group = region.shard.group
        self._is_even = known_equal(region.shard.tokens % self._group.size, 0)
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
        if node.target in _RESHAPES:
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
