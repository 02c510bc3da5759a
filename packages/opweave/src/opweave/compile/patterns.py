"""Derive fusion patterns from composites.

The native function of a composite calls other ops. It is traced twice, with different sizes and
numbers. Constants that differ between the two graphs depend on the arguments, and become parameters
of the pattern (wildcards); everything else must match exactly. A constant that equals exactly one
argument, such as the name of a process group, becomes a wildcard too. Matches are verified
afterwards, see :func:`opweave.compile.matching.find`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import ir_call, is_op, operands, replace, strip_views, uses
from opweave.compile.tracing import AtenTrace, Function, Tracer, arguments, inline
from opweave.ir import IrOp
from opweave.ir.errors import described
from opweave.ir.priority import NATIVE
from opweave.ir.spelling import Spelling

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
        function: the spelling that the graph is of; None: the op's native function.
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
    function: Function | None = None
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

    op: IrOp
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
        return Derivation(op, (), (f"{op.name} does not have an input generator to trace it with",))
    generator = generator or op.input_generator
    function = spelling.function if spelling else None
    tracer = Tracer()
    first = _generated(generator, 1, options)
    second = first if spelling else _generated(generator, 2, options)
    patterns, failures = _forms(op, first, second, tracer, function)
    for a, b in _variants(op, first, second, patterns):
        more, why = _forms(op, a, b, tracer, function)
        patterns += more
        failures += why
    return Derivation(op, tuple(patterns), tuple(failures))


def _forms(
    op: IrOp, first: Values, second: Values, tracer: Tracer, function: Function | None
) -> tuple[list[Pattern], list[str]]:
    """Return the patterns for two argument lists, without and with inner composites expanded."""
    forms = (False,) if function else (False, True)  # a spelling does not call composites
    try:
        found = [_pattern(op, first, second, tracer, function, expand=e) for e in forms]
    except Exception as error:  # a third-party definition may raise anything
        return [], [described(error)[:200]]
    kinds = [[node.target for node in pattern.info.ops] for pattern in found]
    return found[: 1 if kinds[0] == kinds[-1] else 2], []


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
    tracer: Tracer,
    function: Function | None,
    *,
    expand: bool,
) -> Pattern:
    graphs = [
        _definition(op, values, tracer, function, expand=expand) for values in (first, second)
    ]
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
            found = [i for i, p in scalars.items() if p == (x, y) and type(p[0]) is type(x)]
            if found and (len(found) == 1 or x != y):
                wildcards[a, place] = found[0]
            elif function is not None and type(x) is int:
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
        function,
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
    op: IrOp, fakes: Values, tracer: Tracer, function: Function | None = None, *, expand: bool
) -> GraphInfo:
    """Return the graph of the native implementation of *op*, or of *function*, for *fakes*.

    With *expand*, composites inside it are expanded.

    Raises:
        ValueError: tracing failed.
    """
    trace = tracer.trace(op.impls[NATIVE], fakes, function)
    if trace.failure:
        raise ValueError(trace.failure)
    return _expanded(trace, tracer) if expand else trace.info


def _definition(
    op: IrOp, values: Values, tracer: Tracer, function: Function | None, *, expand: bool
) -> GraphInfo:
    with compat.FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in values)
    return definition(op, fakes, tracer, function, expand=expand)


def _expanded(trace: AtenTrace, tracer: Tracer) -> GraphInfo:
    """Return the graph of *trace* with inner composites expanded."""
    info = trace.info
    while inner := [call for call in info.calls.values() if call.op.composite]:
        if info is trace.info:  # the trace itself must not change
            graph = Graph(trace.module)
            graph.output(graph.graph_copy(info.graph, {}))
        else:
            call = inner[0]
            part = tracer.trace(call.op.impls[NATIVE], call.fakes)
            replace(call, inline(graph, part, call.node, arguments(call)))
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
