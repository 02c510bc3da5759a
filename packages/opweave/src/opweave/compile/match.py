"""Derive fusion patterns from composites, find them in a graph, and explain near misses."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat, tracing
from opweave.compile.aliasing import expression
from opweave.compile.graph import (
    GraphInfo,
    fake_of,
    ir_call,
    is_op,
    kind,
    operands,
    replace,
    strip_views,
    uses,
)
from opweave.ir import IrOp
from opweave.ir.errors import described
from opweave.ir.op import Spelling
from opweave.ir.priority import NATIVE
from opweave.ir.rules import ROWWISE
from opweave.torch_compat import depends_on_data

# Derive fusion patterns from composites.
#
# The native function of a composite calls other ops. It is traced twice, with different sizes
# and numbers. Constants that differ between the two graphs depend on the arguments, and become
# parameters of the pattern (wildcards); everything else must match exactly. A constant that
# equals exactly one argument, such as the name of a process group, becomes a wildcard too.
# Matches are verified afterwards, see :func:`find`.


Values = tuple[Any, ...]

_derived: dict[Any, Derivation] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Pattern:
    """One form of a composite in a graph.

    Attributes:
        op: the composite.
        info: the graph of its definition in aten and IR ops.
        values: the arguments of the trace; None for an omitted optional argument.
        parameters: the positions of the parameters that are inputs of the graph, in its order.
        anchor: the last op of the chain, where the search begins.
        wildcards: constants that stand for a parameter: (node, operand) -> parameter.
        outputs: the nodes that the composite returns.
        spelling: the spelling whose graph it is; None for the op's native function.
        free: integers that may depend on the sizes of the arguments: (node, position). A match is
            checked against the function traced for the sizes that were found.
    """

    op: IrOp
    info: GraphInfo
    values: Values
    parameters: tuple[int, ...]
    anchor: Node
    wildcards: dict[tuple[Node, int], int]
    outputs: tuple[Node, ...]
    spelling: Spelling | None = None
    free: frozenset[tuple[Node, int]] = frozenset()

    @property
    def size(self) -> int:
        """The number of ops."""
        return len(self.info.ops)

    @property
    def variant(self) -> str:
        """The flags and omitted arguments that distinguish this pattern of the composite."""
        bound = set(self.wildcards.values())
        fixed = [
            f"{name}={value}"
            for i, (name, value) in enumerate(zip(self.op.schema.names, self.values, strict=True))
            if (value is None or isinstance(value, bool)) and i not in bound
        ]
        return ", ".join(fixed)


@dataclass(frozen=True)
class Derivation:
    """The patterns of one composite, and the reasons why others could not be derived."""

    patterns: tuple[Pattern, ...]
    failures: tuple[str, ...]


def derivation(op: IrOp, spelling: Spelling | None = None, **options: Any) -> Derivation:
    """Return the result of :func:`derive`, which is computed once per process."""
    key = op, spelling, tuple(options.items())
    with _lock:
        if key not in _derived:
            with compat.no_modes():
                _derived[key] = derive(op, spelling, **options)
        return _derived[key]


def derive(op: IrOp, spelling: Spelling | None = None, **options: Any) -> Derivation:
    """Derive the patterns of an op from its definition and its input generator.

    Args:
        op: a composite, or any op with a spelling.
        spelling: derive the patterns of this function in place of the definition.
        options: for the input generator, such as ``dtype``.
    """
    generator = spelling.inputs if spelling else None
    if generator is None and not op.has_input_generator:
        return Derivation((), (f"{op.name} does not have an input generator to trace it with",))
    generator = generator or op.input_generator
    tracer = tracing.Tracer()
    first = _generated(generator, 1, options)
    second = first if spelling else _generated(generator, 2, options)
    patterns, failures = _forms(op, first, second, tracer, spelling)
    for a, b in _variants(op, first, second, patterns):
        more, why = _forms(op, a, b, tracer, spelling)
        patterns += more
        failures += why
    return Derivation(tuple(patterns), tuple(failures))


def _forms(
    op: IrOp, first: Values, second: Values, tracer: tracing.Tracer, spelling: Spelling | None
) -> tuple[list[Pattern], list[str]]:
    """Return the patterns for two argument lists, without and with inner composites expanded."""
    forms = (False,) if spelling else (False, True)  # a spelling does not call composites
    try:
        patterns = [_pattern(op, first, second, tracer, spelling, expand=e) for e in forms]
    except Exception as error:  # a third-party definition may raise anything
        return [], [described(error)[:200]]
    kinds = [[node.target for node in pattern.info.ops] for pattern in patterns]
    return patterns[: 1 if kinds[0] == kinds[-1] else 2], []


def _variants(
    op: IrOp, first: Values, second: Values, patterns: list[Pattern]
) -> Iterator[tuple[Values, Values]]:
    """Yield pairs of argument lists for omitted tensors and flags that *patterns* do not cover."""
    params = op.schema.params
    covered = set.intersection(*(_covered(p) for p in patterns)) if patterns else set()
    optional = [i for i, p in enumerate(params) if p.is_tensor and p.is_optional]
    choices: list[tuple[tuple[int, Any], ...]]
    choices = [((i, None), (i, first[i])) for i in optional if first[i] is not None]
    choices += [((i, False), (i, True)) for i, v in enumerate(first) if isinstance(v, bool)]
    for chosen in product(*(c for c in choices if c[0][0] not in covered)):
        a, b = list(first), list(second)
        for i, value in chosen:
            if not isinstance(value, Tensor):
                a[i] = b[i] = value
        if any(x is not y for x, y in zip(a, first, strict=True)):
            yield tuple(a), tuple(b)


def _covered(pattern: Pattern) -> set[int]:
    """Return the parameters for which the pattern matches every variant.

    These are flags that are passed on to an op, and tensors that are passed on only to optional
    parameters.
    """
    tensors = dict(zip(pattern.parameters, pattern.info.inputs, strict=True))
    passed_on = {i for i, node in tensors.items() if all(_takes_none(u, node) for u in node.users)}
    return passed_on | set(pattern.wildcards.values())


def _takes_none(user: Node, node: Node) -> bool:
    call = ir_call(user)
    if call is None:
        return False
    pairs = zip(call.op.schema.params, call.values, strict=True)
    return all(param.is_optional for param, value in pairs if value is node)


def _generated(generator: Callable[..., Values], scale: int, options: Mapping[str, Any]) -> Values:
    """Generate arguments, with every float replaced by a recognizable value."""
    sizes = {
        name: p.default * scale
        for name, p in inspect.signature(generator).parameters.items()
        if isinstance(p.default, int) and not isinstance(p.default, bool)
    }
    values = list(generator(**sizes, **options))
    for i, value in enumerate(values):
        if isinstance(value, float):
            values[i] = 0.0123 + 0.001 * i + 0.0004 * scale
    return tuple(values)


def _pattern(
    op: IrOp,
    first: Values,
    second: Values,
    tracer: tracing.Tracer,
    spelling: Spelling | None,
    *,
    expand: bool,
) -> Pattern:
    with compat.FakeTensorMode() as mode:
        fakes = [
            tuple(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in values)
            for values in (first, second)
        ]
    graphs = [definition(op, values, tracer, spelling, expand=expand) for values in fakes]
    _check_comparable(graphs[0])
    nodes = [graph.ops for graph in graphs]
    if [n.target for n in nodes[0]] != [n.target for n in nodes[1]]:
        raise ValueError("its ops depend on the sizes of its arguments")
    scalars = {
        i: (a, b)
        for i, (a, b) in enumerate(zip(first, second, strict=True))
        if isinstance(a, (int, float, str))
    }
    wildcards: dict[tuple[Node, int], int] = {}
    free: set[tuple[Node, int]] = set()
    for a, b in zip(*nodes, strict=True):
        for place, (x, y) in enumerate(zip(operands(a), operands(b), strict=True)):
            if x is None or isinstance(x, (Node, list, tuple)):
                continue
            equal = [i for i, p in scalars.items() if p == (x, y) and type(p[0]) is type(x)]
            if equal and (len(equal) == 1 or x != y):
                wildcards[a, place] = equal[0]
            elif spelling is not None and type(x) is int:
                free.add((a, place))
            elif x != y:
                raise ValueError(f"the constant {x} of {a.target} depends on its arguments")
    output: Any = graphs[0].nodes[-1].args[0]
    outputs = tuple(output) if isinstance(output, (list, tuple)) else (output,)
    return Pattern(
        op,
        graphs[0],
        first,
        tuple(i for i, value in enumerate(first) if isinstance(value, Tensor)),
        _anchor(nodes[0], op),
        wildcards,
        outputs,
        spelling,
        frozenset(free),
    )


def _check_comparable(graph: GraphInfo) -> None:
    """Check that equal operands and results imply equal values.

    Raises:
        ValueError: the graph contains a node whose value depends on something else.
    """
    for node in graph.nodes:
        if node.op == "get_attr":
            raise ValueError(f"its definition contains the constant tensor {node.target}")
        if node.op == "call_function" and compat.draws_random_numbers(node.target):
            raise ValueError(f"{node.target} draws random numbers, and a kernel draws others")
        if isinstance(node.target, compat.HigherOrderOperator):
            raise ValueError(f"{node.target} contains a graph of its own")
    results = {value for n in graph.ops for value in (n, *n.users)}
    for value in graph.nodes[-1].all_input_nodes:
        if strip_views(value) not in results:
            raise ValueError(f"it returns its argument {value}")


def definition(
    op: IrOp,
    fakes: Values,
    tracer: tracing.Tracer,
    spelling: Spelling | None = None,
    *,
    expand: bool,
) -> GraphInfo:
    """Return the graph of the native implementation of *op*, or of *spelling*, for *fakes*.

    With *expand*, composites inside it are expanded.

    Raises:
        ValueError: tracing failed.
    """
    trace = tracer.trace(op.impls[NATIVE], fakes, spelling.function if spelling else None)
    if trace.failure:
        raise ValueError(trace.failure)
    return _expanded(trace, tracer) if expand else trace.info


def _expanded(trace: tracing.AtenTrace, tracer: tracing.Tracer) -> GraphInfo:
    """Return the graph of *trace* with inner composites expanded."""
    info = trace.info
    while inner := [call for call in info.calls.values() if call.op.composite]:
        if info is trace.info:  # the trace itself must not change
            graph = Graph(trace.module)
            graph.output(graph.graph_copy(info.graph, {}))
        else:
            call = inner[0]
            part = tracer.trace(call.op.impls[NATIVE], call.fakes)
            replace(call, tracing.inline(graph, part, call.node, tracing.arguments(call)))
            graph.eliminate_dead_code()
        info = GraphInfo(graph)
    return info


def _anchor(nodes: list[Node], op: IrOp) -> Node:
    """Return the last op, which depends on all others.

    Raises:
        ValueError: there are several.
    """
    ends = [n for n in nodes if not any(is_op(user) for _, user in uses(n))]
    if len(ends) != 1:
        names = ", ".join(str(end.target) for end in ends)
        raise ValueError(f"{op.name} ends in several ops ({names}), not in one")
    return ends[0]


# Find a pattern in a graph, and explain near misses.
#
# A match binds values: a node and, for an op with several results, the part that is read. The
# search follows the operands of the pattern's last op. Then :func:`_mismatch` traces the
# composite with the arguments of the match, and compares every operand and result of the trace
# with the graph, independently of the search.


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
        nodes = [self.nodes[node] for node in self.pattern.info.ops]
        return [node for node in nodes if node is not None]

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

    def value(self, expected: Node, actual: object, where: str) -> None:
        """Match a value of the pattern and, recursively, the operands of the op it comes from."""
        source, part = _value(expected)
        if not is_op(source):
            self._tensor(source, actual, where)
            return
        node, found_part = _value(actual)
        if not isinstance(node, Node) or kind(node) != kind(source):
            self._miss(f"{where} is {_name(node)}, not {_name(source)}")
        if found_part != part:
            self._miss(f"{where} is part {found_part} of {node.name}, not part {part}")
        if source not in self.nodes:
            self._operands(source, node)
        elif self.nodes[source] is not node:
            self._miss(f"{where} is {node.name}, not {self.nodes[source]}")

    def _operands(self, expected: Node, node: Node) -> None:
        orders = [operands(node)]
        if _is_commutative(node):
            first, second, *alpha = orders[0]
            orders.append([second, first, *alpha])
        misses: list[NoMatchError] = []
        for order in orders:
            saved = dict(self.nodes), dict(self.scalars)
            self.nodes[expected] = node
            try:
                self._match_operands(expected, node, order)
                return
            except NoMatchError as miss:
                misses.append(miss)
                self.nodes, self.scalars = saved
        raise max(misses, key=lambda miss: miss.matched)

    def _match_operands(self, expected: Node, node: Node, order: list[Any]) -> None:
        for place, (want, have) in enumerate(zip(operands(expected), order, strict=True)):
            where = f"operand {place} of {node.name}"
            if isinstance(want, Node):
                self.value(want, have, where)
            elif isinstance(want, (list, tuple)):
                self._list(want, have, where)
            elif (expected, place) in self.pattern.wildcards:
                self._scalar(self.pattern.wildcards[expected, place], have, where)
            # _mismatch() compares free integers for the actual arguments.
            elif (expected, place) not in self.pattern.free and not _equal(want, have):
                self._miss(f"{where} is {have}, not {want}")

    def _list(self, expected: Sequence[Any], actual: object, where: str) -> None:
        """Match the tensors in a list; _mismatch() compares sizes for the actual arguments."""
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            self._miss(f"{where} is {actual}, not {list(expected)}")
        for want, have in zip(expected, actual, strict=True):
            if isinstance(want, Node):
                self.value(want, have, where)

    def _tensor(self, parameter: Node, actual: object, where: str) -> None:
        if actual is None and self._is_optional(parameter):
            if self.nodes.setdefault(parameter, None) is not None:
                self._miss(f"{where} is None, elsewhere it is {self.nodes[parameter]}")
            return
        if not isinstance(actual, Node) or not isinstance(fake_of(actual), Tensor):
            self._miss(f"{where} is {actual}, not a tensor")
        bound = self.nodes.setdefault(parameter, actual)
        if _value(bound) != _value(actual):
            self._miss(f"{where} is {actual}, not {bound}")

    def _is_optional(self, parameter: Node) -> bool:
        position = self.pattern.info.inputs.index(parameter)
        return self.pattern.op.schema.params[self.pattern.parameters[position]].is_optional

    def _scalar(self, position: int, actual: object, where: str) -> None:
        bound = self.scalars.setdefault(position, actual)
        if not _equal(bound, actual):
            self._miss(f"{where} is {actual}, elsewhere it is {bound}")

    def _miss(self, reason: str) -> NoReturn:
        raise NoMatchError(reason, len(self.nodes))


def find(pattern: Pattern, anchor: Node, tracer: tracing.Tracer) -> Match:
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
            fixed = fixed or (pattern.spelling is not None and isinstance(traced, str))
            values.append(traced if fixed else param.default)
    return tuple(values)


def _mismatch(match: Match, tracer: tracing.Tracer) -> str:
    """Return how the composite would differ from the matched nodes, or an empty string.

    The composite is traced with the arguments of the match. Every op in the trace must have
    operands of the same values, shapes and dtypes as its counterpart in the graph, and the trace
    must return the same results.
    """
    pattern, inner = match.pattern, match.inner
    fakes = tuple(torch.fx.map_arg(list(match.values), fake_of))
    expand = not any(call.op.composite for call in pattern.info.calls.values())
    try:
        trace = definition(pattern.op, fakes, tracer, pattern.spelling, expand=expand)
    except ValueError as error:
        return f"{pattern.op.name} does not take these arguments: {error}"
    if len(trace.ops) != len(inner):
        return f"{pattern.op.name} is another chain of ops for these arguments"
    inputs = [n for n in tracing.flat_nodes(match.values) if tracing.variables([fake_of(n)])]
    twins: dict[Node, Node] = dict(zip(trace.inputs, inputs, strict=True))
    for want, have in zip(trace.ops, inner, strict=True):
        if kind(want) != kind(have):
            return f"{have.name} is {_name(have)}, not {_name(want)}"
        by_row = _is_rowwise(want) and _is_rowwise(have)
        see = partial(_seen, last_dim_only=by_row)
        expected = [see(value, twins) for value in operands(want)]
        actual = [see(value) for value in operands(have)]
        if _is_commutative(have) and [*expected[1::-1], *expected[2:]] == actual:
            expected = actual
        if expected != actual:
            pairs = zip(expected, actual, operands(want), operands(have), strict=True)
            differing = [(i, a, b) for i, (x, y, a, b) in enumerate(pairs) if x != y]
            place, a, b = differing[0]
            return f"operand {place} of {have.name} is {_show(b)}, not {_show(a)}"
        if see(fake_of(want)) != see(fake_of(have)):
            return f"{have.name} gives {_show(have)}, not {_show(want)}"
        twins[want] = have
    returned = [_twin(node, twins) for node in tracing.flat_nodes(trace.nodes[-1].args)]
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
        shapes = [[*map(expression, f.shape)] for f in fakes if isinstance(f, Tensor)]
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
        return tuple(map(expression, sizes)), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_seen(item, twins, last_dim_only=last_dim_only) for item in value)
    return tracing.signature(value) if isinstance(value, float) else expression(value)


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
    return tracing.signature(a) == tracing.signature(b)
