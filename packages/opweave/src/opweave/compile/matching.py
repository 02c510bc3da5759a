"""Find a pattern in a graph, and explain near misses.

A match binds values: a node and, for an op with several results, the part that is read. The search
follows the operands of the pattern's last op. Then :func:`_mismatch` traces the composite with the
arguments of the match, and compares every operand and result of the trace with the graph,
independently of the search.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Node

from opweave.base.compat import depends_on_data
from opweave.compile.nodes import fake_of, ir_call, is_op, kind, operands, strip_views, uses
from opweave.compile.patterns import Pattern, definition
from opweave.compile.tracing import Tracer, flat_nodes, signature, variables
from opweave.ir.priority import NATIVE
from opweave.ir.traits import ROWWISE

aten = torch.ops.aten
WHOLE = 1000  # for NoMatchError.matched: all ops matched (more than any pattern has)
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass
class Match:
    """An occurrence of a pattern in a graph.

    Attributes:
        pattern: the pattern.
        nodes: the graph's node for each node of the pattern; None for an omitted argument.
        values: the arguments for the composite, one per parameter.
    """

    pattern: Pattern
    nodes: dict[Node, Node | None]
    values: tuple[Any, ...]

    @property
    def inner(self) -> list[Node]:
        """The ops of the graph that the composite replaces."""
        found = [self.nodes[node] for node in self.pattern.info.ops]
        return [node for node in found if node is not None]

    def outputs(self) -> list[Node | None]:
        """Return the graph's nodes for the outputs of the composite; None for unused outputs."""
        return [_counterpart(node, self.nodes) for node in self.pattern.outputs]


@dataclass
class NoMatchError(Exception):
    """A pattern does not match.

    Attributes:
        reason: a sentence.
        matched: the number of its nodes that matched; WHOLE if all did.
        inner: the nodes of the graph that its ops matched, if all did.
    """

    reason: str
    matched: int
    inner: tuple[Node, ...] = ()


@dataclass
class _Search:
    pattern: Pattern
    nodes: dict[Node, Node | None] = field(default_factory=dict)
    scalars: dict[int, Any] = field(default_factory=dict)

    def value(self, wanted: Node, found: object, where: str) -> None:
        """Match a value of the pattern and, recursively, the operands of the op it comes from."""
        source, part = _value(wanted)
        if not is_op(source):
            self._tensor(source, found, where)
            return
        node, found_part = _value(found)
        if not isinstance(node, Node) or kind(node) != kind(source):
            self._miss(f"{where} is {_name(node)}, not {_name(source)}")
        if found_part != part:
            self._miss(f"{where} is part {found_part} of {node.name}, not part {part}")
        if source not in self.nodes:
            self._operands(source, node)
        elif self.nodes[source] is not node:
            self._miss(f"{where} is {node.name}, not {self.nodes[source]}")

    def _operands(self, wanted: Node, node: Node) -> None:
        orders = [operands(node)]
        if _is_commutative(node):
            first, second, *alpha = orders[0]
            orders.append([second, first, *alpha])
        misses: list[NoMatchError] = []
        for order in orders:
            saved = dict(self.nodes), dict(self.scalars)
            self.nodes[wanted] = node
            try:
                self._each(wanted, node, order)
                return
            except NoMatchError as miss:
                misses.append(miss)
                self.nodes, self.scalars = saved
        raise max(misses, key=lambda miss: miss.matched)

    def _each(self, wanted: Node, node: Node, found: list[Any]) -> None:
        for place, (want, have) in enumerate(zip(operands(wanted), found, strict=True)):
            where = f"operand {place} of {node.name}"
            if isinstance(want, Node):
                self.value(want, have, where)
            elif isinstance(want, (list, tuple)):
                self._list(want, have, where)
            elif (wanted, place) in self.pattern.wildcards:
                self._scalar(self.pattern.wildcards[wanted, place], have, where)
            # _mismatch() compares free integers for the actual arguments.
            elif (wanted, place) not in self.pattern.free and not _equal(want, have):
                self._miss(f"{where} is {have}, not {want}")

    def _list(self, wanted: Sequence[Any], found: object, where: str) -> None:
        """Match the tensors in a list; _mismatch() compares sizes for the actual arguments."""
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            self._miss(f"{where} is {found}, not {list(wanted)}")
        for want, have in zip(wanted, found, strict=True):
            if isinstance(want, Node):
                self.value(want, have, where)

    def _tensor(self, parameter: Node, found: object, where: str) -> None:
        if found is None and self._is_optional(parameter):
            if self.nodes.setdefault(parameter, None) is not None:
                self._miss(f"{where} is None, elsewhere it is {self.nodes[parameter]}")
            return
        if not isinstance(found, Node) or not isinstance(fake_of(found), Tensor):
            self._miss(f"{where} is {found}, not a tensor")
        bound = self.nodes.setdefault(parameter, found)
        if _value(bound) != _value(found):
            self._miss(f"{where} is {found}, not {bound}")

    def _is_optional(self, parameter: Node) -> bool:
        position = self.pattern.info.inputs.index(parameter)
        return self.pattern.op.schema.params[self.pattern.parameters[position]].is_optional

    def _scalar(self, position: int, found: object, where: str) -> None:
        bound = self.scalars.setdefault(position, found)
        if not _equal(bound, found):
            self._miss(f"{where} is {found}, elsewhere it is {bound}")

    def _miss(self, reason: str) -> NoReturn:
        raise NoMatchError(reason, len(self.nodes))


def find(pattern: Pattern, anchor: Node, tracer: Tracer) -> Match:
    """Return the match of *pattern* whose last op is *anchor*.

    Raises:
        NoMatchError: there is no match.
    """
    search = _Search(pattern)
    search.value(pattern.anchor, anchor, "the op")
    misses: list[NoMatchError] = []
    for nodes in _bindings(pattern, search.nodes):
        match = Match(pattern, nodes, _values(pattern, nodes, search.scalars))
        try:
            reason = _mismatch(match, tracer)
        except Exception as error:
            if not depends_on_data(error):
                raise
            reason = "whether it matches depends on data-dependent sizes"
        inner = tuple(match.inner)
        if not reason:
            reason = _escape(match) or _disorder(match)
            if not reason:
                return match
            raise NoMatchError(reason, WHOLE, inner)
        misses.append(NoMatchError(reason, WHOLE, inner))
    raise misses[0]


def _escape(match: Match) -> str:
    """Return the use of an intermediate result outside the match, if there is one."""
    inside, returned = set(match.inner), set(match.outputs())
    for node in match.inner:
        for value, reader in uses(node):
            outputs = {node, strip_views(value)}
            if reader not in inside and not outputs & returned:
                return f"{value.name} is used elsewhere, by {reader.name}"
    return ""


def _disorder(match: Match) -> str:
    """Return the argument of the composite that is or needs its result, if there is one."""
    inside = set(match.inner)
    waiting = [o for o in match.outputs() if o is not None]
    later = set(waiting)
    while waiting:
        for user in waiting.pop().users:
            if user not in inside and user not in later:
                later.add(user)
                waiting.append(user)
    for value in match.values:
        if isinstance(value, Node) and value in later:
            return f"its argument {value.name} needs its result"
    return ""


def _bindings(
    pattern: Pattern, nodes: dict[Node, Node | None]
) -> Iterator[dict[Node, Node | None]]:
    """Yield the nodes with the input tensors as they are used, then with their base tensors."""
    yield nodes
    stripped = {**nodes, **{n: strip_views(nodes[n]) for n in pattern.info.inputs if n in nodes}}
    if stripped != nodes:
        yield stripped


def _values(
    pattern: Pattern, nodes: Mapping[Node, Node | None], scalars: Mapping[int, Any]
) -> tuple[Any, ...]:
    """Return the arguments of the composite."""
    tensors = dict(zip(pattern.parameters, pattern.info.inputs, strict=True))
    values: list[Any] = []
    for position, (param, traced) in enumerate(
        zip(pattern.op.schema.params, pattern.values, strict=True)
    ):
        if position in tensors:
            if tensors[position] not in nodes:
                raise NoMatchError(f"{param.name} is unknown", len(nodes))
            values.append(nodes[tensors[position]])
        elif position in scalars:
            values.append(scalars[position])
        else:
            fixed = traced is None or isinstance(traced, bool)
            fixed = fixed or (pattern.function is not None and isinstance(traced, str))
            values.append(traced if fixed else param.default)
    return tuple(values)


def _mismatch(match: Match, tracer: Tracer) -> str:
    """Return how the composite would differ from the matched nodes, or an empty string.

    The composite is traced with the arguments of the match. Every op in the trace must have
    operands of the same values, shapes and dtypes as its counterpart in the graph, and the trace
    must return the same results.
    """
    pattern, inner = match.pattern, match.inner
    fakes = tuple(torch.fx.map_arg(list(match.values), fake_of))
    expand = not any(call.op.composite for call in pattern.info.calls.values())
    try:
        trace = definition(pattern.op, fakes, tracer, pattern.function, expand=expand)
    except ValueError as error:
        return f"{pattern.op.name} does not take these arguments: {error}"
    if len(trace.ops) != len(inner):
        return f"{pattern.op.name} is another chain of ops for these arguments"
    given = [n for n in flat_nodes(match.values) if variables([fake_of(n)])]
    twins: dict[Node, Node] = dict(zip(trace.inputs, given, strict=True))
    for want, have in zip(trace.ops, inner, strict=True):
        if kind(want) != kind(have):
            return f"{have.name} is {_name(have)}, not {_name(want)}"
        by_row = _is_rowwise(want) and _is_rowwise(have)
        see = partial(_seen, last_dim_only=by_row)
        expected = [see(value, twins) for value in operands(want)]
        found = [see(value) for value in operands(have)]
        if _is_commutative(have) and [*expected[1::-1], *expected[2:]] == found:
            expected = found
        if expected != found:
            pairs = zip(expected, found, operands(want), operands(have), strict=True)
            differing = [(i, a, b) for i, (x, y, a, b) in enumerate(pairs) if x != y]
            place, a, b = differing[0]
            return f"operand {place} of {have.name} is {_show(b)}, not {_show(a)}"
        if see(fake_of(want)) != see(fake_of(have)):
            return f"{have.name} gives {_show(have)}, not {_show(want)}"
        twins[want] = have
    returned = [_twin(node, twins) for node in flat_nodes(trace.nodes[-1].args)]
    if returned != [_twin(node, match.nodes) for node in pattern.outputs]:
        return f"{pattern.op.name} returns other results for these arguments"
    return ""


def _is_commutative(node: Node) -> bool:
    """Return whether the first two operands are interchangeable: no ``alpha`` scales a sum."""
    return node.target in COMMUTATIVE and operands(node)[2:] in ([], [1])


def _is_rowwise(node: Node) -> bool:
    """Return whether the leading dimensions do not matter.

    This is true for row-wise ops, and for sums and products of tensors of one shape.
    """
    call = ir_call(node)
    if call is None:
        fakes = [fake_of(value) for value in operands(node) if isinstance(value, Node)]
        shapes = [[*map(_size, f.shape)] for f in fakes if isinstance(f, Tensor)]
        return node.target in COMMUTATIVE and all(shape == shapes[0] for shape in shapes)
    return ROWWISE in call.op.impls[NATIVE].traits


def _show(value: Any) -> str:
    fake = fake_of(value) if isinstance(value, Node) else value
    if isinstance(fake, Tensor):
        return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}"
    return repr(fake)


def _seen(
    value: Any, twins: Mapping[Node, Node | None] | None = None, *, last_dim_only: bool
) -> Any:
    """Return a key for an operand or a result.

    It contains the value, shape, dtype and device of a tensor; the value of a node in a trace is
    that of its twin in the graph. With *last_dim_only*, the key ignores how the leading dimensions
    are arranged.
    """
    if isinstance(value, Node):
        fake = fake_of(value)
        key = _seen(fake, last_dim_only=last_dim_only)
        return (_twin(value, twins), key) if isinstance(fake, Tensor) else key
    if isinstance(value, Tensor):
        sizes = (value.numel(), *value.shape[-1:]) if last_dim_only else value.shape
        return tuple(map(_size, sizes)), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_seen(item, twins, last_dim_only=last_dim_only) for item in value)
    return signature(value) if isinstance(value, float) else _size(value)


def _size(value: Any) -> Any:
    """Return a symbolic number as its expression: comparing two of them would add a guard."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def _value(node: Any) -> tuple[Any, Any]:
    """Return the node that computes a value, and the part of its results; None for all of them.

    Views are ignored.
    """
    node = strip_views(node)
    if isinstance(node, Node) and node.target is operator.getitem:
        return strip_views(node.args[0]), node.args[1]
    return node, None


def _twin(node: Node, twins: Mapping[Node, Node | None] | None) -> tuple[Any, Any]:
    """Return the value of the graph for that of a trace; without *twins*, the value itself."""
    source, part = _value(node)
    if twins is None:
        return source, part
    twin = twins.get(source)
    return _value(twin) if part is None else (twin, part)


def _counterpart(node: Node, nodes: Mapping[Node, Node | None]) -> Node | None:
    """Return the graph's node for *node* of the pattern, through views and tuple items."""
    source, part = _value(node)
    twin = nodes[source]
    if part is None or twin is None:
        return twin
    items = [u for u in twin.users if u.target is operator.getitem and u.args[1] == part]
    return items[0] if items else None


def _name(value: object) -> str:
    if not isinstance(value, Node):
        return repr(value)
    call = ir_call(value)
    if call:
        return call.op.name
    return f"the input {value.name}" if value.op == "placeholder" else str(value.target)


def _equal(a: object, b: object) -> bool:
    return signature(a) == signature(b)
