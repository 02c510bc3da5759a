"""Finding a pattern in a graph, and saying what is in the way where it is nearly there."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.base.compat import depends_on_data
from opweave.compile.nodes import fake_of, ir_call
from opweave.compile.patterns import Pattern, definition, is_op, operands, strip_views
from opweave.compile.tracing import Tracer
from opweave.ir.priority import NATIVE
from opweave.ir.traits import ROWWISE

aten = torch.ops.aten
WHOLE = 1000  # more than any pattern has: all ops were there
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass
class Match:
    """Where a pattern was found.

    Attributes:
        pattern: the pattern.
        nodes: what each op and tensor of the pattern is in the graph; None if it was left out.
        values: the arguments for the composite, one per parameter.
    """

    pattern: Pattern
    nodes: dict[Node, Node | None]
    values: tuple[Any, ...]

    @property
    def inner(self) -> list[Node]:
        """The ops of the graph that the composite replaces."""
        found = [self.nodes[node] for node in self.pattern.graph.nodes if is_op(node)]
        return [node for node in found if node is not None]

    def outputs(self) -> list[Node | None]:
        """What the graph calls the outputs of the composite; None where nobody uses one."""
        return [_counterpart(node, self.nodes) for node in self.pattern.outputs]


@dataclass
class NoMatchError(Exception):
    """Why a pattern is not there, and how much of it is."""

    reason: str
    matched: int


@dataclass
class _Search:
    pattern: Pattern
    nodes: dict[Node, Node | None] = field(default_factory=dict)
    scalars: dict[int, Any] = field(default_factory=dict)

    def op(self, wanted: Node, found: object, where: str) -> None:
        """Match an op of the pattern, and what leads to it."""
        node = _source(found)
        part = _part(wanted), _part(strip_views(found))
        wanted = _source(wanted)
        if wanted in self.nodes and self.nodes[wanted] is node:
            return
        if not isinstance(node, Node) or kind(node) != kind(wanted) or part[0] != part[1]:
            self._miss(f"{where} is {_name(node)}, not {_name(wanted)}")
        if wanted in self.nodes:
            self._miss(f"{where} is {node.name}, not {self.nodes[wanted]}")
        self._operands(wanted, node)

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
            if isinstance(want, Node) and is_op(_source(want)):
                self.op(want, have, where)
            elif isinstance(want, Node):
                self._tensor(_source(want), have, where)
            elif (wanted, place) in self.pattern.wildcards:
                self._scalar(self.pattern.wildcards[wanted, place], have, where)
            elif not _is_shape(wanted, place) and not _equal(want, have):
                self._miss(f"{where} is {have}, not {want}")

    def _tensor(self, parameter: Node, found: object, where: str) -> None:
        if found is None and self._is_optional(parameter):
            if self.nodes.setdefault(parameter, None) is not None:
                self._miss(f"{where} is None, elsewhere it is {self.nodes[parameter]}")
            return
        if not isinstance(found, Node) or not isinstance(fake_of(found), Tensor):
            raise NoMatchError(f"{where} is {found}, not a tensor", len(self.nodes))
        bound = self.nodes.setdefault(parameter, found)
        if strip_views(bound) is not strip_views(found):
            self._miss(f"{where} is {found}, not {bound}")

    def _is_optional(self, parameter: Node) -> bool:
        inputs = [node for node in self.pattern.graph.nodes if node.op == "placeholder"]
        position = self.pattern.parameters[inputs.index(parameter)]
        return self.pattern.op.schema.params[position].is_optional

    def _scalar(self, position: int, found: object, where: str) -> None:
        bound = self.scalars.setdefault(position, found)
        if not _equal(bound, found):
            self._miss(f"{where} is {found}, elsewhere it is {bound}")

    def _miss(self, reason: str) -> Any:
        raise NoMatchError(reason, len(self.nodes))


def find(pattern: Pattern, anchor: Node, tracer: Tracer) -> Match:
    """Return where *pattern* ends in *anchor*.

    Raises:
        NoMatchError: it does not.
    """
    search = _Search(pattern)
    search.op(pattern.anchor, anchor, "the op")
    reasons = []
    for nodes in _bindings(pattern, search.nodes):
        match = Match(pattern, nodes, _values(pattern, nodes, search.scalars))
        try:
            reason = _mismatch(match, tracer)
        except Exception as error:
            if not depends_on_data(error):
                raise
            reason = "sizes that only the data will tell decide whether it is there"
        if not reason:
            _check_escapes(match)
            _check_order(match)
            return match
        reasons.append(reason)
    raise NoMatchError(reasons[0], WHOLE)


def _check_escapes(match: Match) -> None:
    """Raise NoMatchError if something that the composite does not return is used elsewhere."""
    inside, returned = set(match.inner), set(match.outputs())
    for node in match.inner:
        for value, reader in _uses(node):
            outputs = {node, strip_views(value)}
            if reader not in inside and not outputs & returned:
                raise NoMatchError(f"{value.name} is used elsewhere, by {reader.name}", WHOLE)


def _check_order(match: Match) -> None:
    """Raise NoMatchError if an argument of the composite is computed from its own result."""
    inside = set(match.inner)
    waiting = [o for o in match.outputs() if o is not None]
    later: set[Node] = set()
    while waiting:
        for user in waiting.pop().users:
            if user not in inside and user not in later:
                later.add(user)
                waiting.append(user)
    for value in match.values:
        if isinstance(value, Node) and value in later:
            raise NoMatchError(f"its argument {value.name} needs its result", WHOLE)


def _uses(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (value, reader) for every use of an op's results, through views and parts."""
    waiting = [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            through = user.op == "call_function" and not is_op(user)
            if through and not (user.users == {} and user.op == "output"):
                waiting.append(user)
            else:
                yield value, user


def _bindings(
    pattern: Pattern, nodes: dict[Node, Node | None]
) -> Iterator[dict[Node, Node | None]]:
    """The tensors of the pattern as they are used, then as what those are views of."""
    yield nodes
    inputs = [node for node in pattern.graph.nodes if node.op == "placeholder"]
    stripped = {**nodes, **{n: strip_views(nodes[n]) for n in inputs if n in nodes}}
    if stripped != nodes:
        yield stripped


def _values(
    pattern: Pattern, nodes: Mapping[Node, Node | None], scalars: Mapping[int, Any]
) -> tuple[Any, ...]:
    inputs = [node for node in pattern.graph.nodes if node.op == "placeholder"]
    tensors = dict(zip(pattern.parameters, inputs, strict=True))
    values: list[Any] = []
    for position, (param, traced) in enumerate(
        zip(pattern.op.schema.params, pattern.values, strict=True)
    ):
        if position in tensors:
            if tensors[position] not in nodes:
                raise NoMatchError(f"nothing says what {param.name} is", len(nodes))
            values.append(nodes[tensors[position]])
        elif position in scalars:
            values.append(scalars[position])
        else:
            fixed = traced is None or isinstance(traced, bool)
            values.append(traced if fixed else param.default)
    return tuple(values)


def _mismatch(match: Match, tracer: Tracer) -> str:
    """Return what the composite would compute differently for these very arguments, if anything.

    Views were looked through. So the composite is traced with the arguments that were found: every
    op in it must see the shapes and numbers that its counterpart in the graph sees.
    """
    pattern = match.pattern
    fakes = tuple(torch.fx.map_arg(list(match.values), fake_of))
    expand = not any(c and c.op.composite for c in map(ir_call, pattern.graph.nodes))
    try:
        graph: Graph = definition(pattern.op, fakes, tracer, expand=expand)
    except ValueError as error:
        return f"{pattern.op.name} does not take these arguments: {error}"
    expected = [node for node in graph.nodes if is_op(node)]
    if len(expected) != len(match.inner):
        return f"{pattern.op.name} is another chain of ops for these arguments"
    for want, have in zip(expected, match.inner, strict=True):
        if kind(want) != kind(have):
            return f"{have.name} is {_name(have)}, not {_name(want)}"
        see = _rows if _is_rowwise(want) and _is_rowwise(have) else _seen
        wanted, found = operands(want), operands(have)
        if _is_commutative(have) and [*map(see, wanted)] != [*map(see, found)]:
            wanted[:2] = wanted[1::-1]
        for place, (a, b) in enumerate(zip(wanted, found, strict=True)):
            if see(a) != see(b):
                return f"operand {place} of {have.name} is {_show(b)}, not {_show(a)}"
        if see(want) != see(have):
            return f"{have.name} gives {_show(have)}, not {_show(want)}"
    return ""


def _is_commutative(node: Node) -> bool:
    """Whether the first two operands may change places: those of a sum unless one is scaled."""
    return node.target in COMMUTATIVE and operands(node)[2:] in ([], [1])


def _is_rowwise(node: Node) -> bool:
    """Whether how the rows are arranged does not matter: in a sum or product, if all are alike."""
    call = ir_call(node)
    if call is None:
        fakes = [fake_of(value) for value in operands(node) if isinstance(value, Node)]
        shapes = [fake.shape for fake in fakes if isinstance(fake, Tensor)]
        return node.target in COMMUTATIVE and all(shape == shapes[0] for shape in shapes)
    return ROWWISE in call.op.impls[NATIVE].traits


def _rows(value: Any) -> Any:
    """Return what an op sees that looks at rows alone: how they are arranged does not matter."""
    if isinstance(value, Node):
        return _rows(fake_of(value))
    if isinstance(value, Tensor):
        return value.numel(), value.shape[-1:], value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_rows, value))
    return value


def _show(value: Any) -> str:
    fake = fake_of(value) if isinstance(value, Node) else value
    if isinstance(fake, Tensor):
        return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}"
    return repr(fake)


def _seen(value: Any) -> Any:
    """Return what an op sees of an operand: shapes and dtypes of tensors, other values as such."""
    if isinstance(value, Node):
        return _seen(fake_of(value))
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_seen, value))
    return value


def _source(node: Any) -> Any:
    """Return the op that *node* comes from, through views and parts of tuples."""
    node = strip_views(node)
    if isinstance(node, Node) and node.target is operator.getitem:
        return strip_views(node.args[0])
    return node


def _part(node: Any) -> Any:
    node = strip_views(node)
    return node.args[1] if isinstance(node, Node) and node.target is operator.getitem else None


def _counterpart(node: Node, nodes: Mapping[Node, Node | None]) -> Node | None:
    """Return what *node* of the pattern is in the graph, through views and parts."""
    found = nodes[_source(node)]
    part = _part(node)
    if part is None or found is None:
        return found
    items = [u for u in found.users if u.target is operator.getitem and u.args[1] == part]
    return items[0] if items else None


def kind(node: Node) -> object:
    """Return which op *node* calls; the overloads of an IR op are one."""
    call = ir_call(node)
    return call.op if call else (node.op, node.target)


def _name(value: object) -> str:
    if not isinstance(value, Node):
        return repr(value)
    call = ir_call(value)
    if call:
        return call.op.name
    return f"the input {value.name}" if value.op == "placeholder" else str(value.target)


def _is_shape(node: Node, place: int) -> bool:
    """Whether an operand is a list of sizes, which :func:`_mismatch` compares for the real ones."""
    return isinstance(operands(node)[place], (list, tuple))


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b
