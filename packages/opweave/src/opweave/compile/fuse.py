"""Fusion: replace chains of ops with the composite that is defined as that chain.

For example, an addition and a norm become ``fused_add_rms_norm`` of :mod:`opweave.ir.ops.norm`.

A composite is formed only if an implementation other than native supports the arguments. Patterns
are derived from the composites (:mod:`opweave.compile.match`). Larger patterns are tried first
in the whole graph, so that a chain of two ops does not break up a chain of three.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from opweave.compile import compat
from opweave.compile import graph as graphs
from opweave.compile.match import WHOLE, Match, NoMatchError, Pattern, derivation, find
from opweave.compile.passes import donated_nodes
from opweave.compile.plan import Context
from opweave.compile.report import MatchReport
from opweave.compile.tracing import Function, arguments, inline
from opweave.ir import IrOp, Registry, current_registry
from opweave.ir.errors import IrError
from opweave.ir.priority import NATIVE
from opweave.ir.selection import candidates

# The search that fusion and recognition share.


class Miss(NamedTuple):
    """A pattern that ends in *anchor*, and why it was not replaced."""

    pattern: Pattern
    anchor: Node
    error: NoMatchError


def replace_matches(
    nodes: Sequence[Node],
    patterns: Iterable[Pattern],
    replace: Callable[[Match], None],
    context: Context,
    *,
    skip_parts: bool = False,
) -> list[Miss]:
    """Replace the matches of *patterns* among *nodes*, larger patterns first in the whole graph.

    Args:
        nodes: operators, in order.
        patterns: the patterns.
        replace: replaces a match; raises NoMatchError if it should stay as it is.
        context: traces definitions.
        skip_parts: do not form an op from a part of a larger form of it that *replace* rejected.

    Returns:
        The misses whose last op was not replaced, nor lies inside a chain that matched a whole
        pattern.
    """
    by_kind: dict[object, list[Pattern]] = {}
    for pattern in patterns:
        by_kind.setdefault(graphs.kind(pattern.anchor), []).append(pattern)
    chances = [(node, p) for node in reversed(nodes) for p in by_kind.get(graphs.kind(node), ())]
    used: set[Node] = set()
    parts: set[tuple[IrOp, Node]] = set()
    inside: set[Node] = set()
    misses: list[Miss] = []
    for anchor, pattern in sorted(chances, key=lambda chance: -chance[1].size):
        if anchor in used or (pattern.op, anchor) in parts:
            continue
        inner: list[Node] = []
        try:
            match = find(pattern, anchor, context.tracer)
            if used & set(match.inner):
                raise NoMatchError("a part of it is in another op", 1)
            inner = match.inner
            replace(match)
            used |= set(inner)
        except NoMatchError as error:
            misses.append(Miss(pattern, anchor, error))
            inside |= {*inner, *error.inner} - {anchor}
            if skip_parts:
                parts |= {(pattern.op, node) for node in error.inner if node is not anchor}
    misses = [miss for miss in misses if miss.anchor not in used]
    return [miss for miss in misses if miss.anchor not in inside or miss.error.matched == WHOLE]


def nearest(
    misses: Iterable[Miss],
    key: Callable[[Miss], Hashable],
    nearness: Callable[[Miss], float],
    *,
    above: float,
) -> list[MatchReport]:
    """Report the nearest miss of each *key*, if its *nearness* is larger than *above*."""
    best: dict[Hashable, Miss] = {}
    for miss in misses:
        other = best.get(key(miss))
        if nearness(miss) > (nearness(other) if other else above):
            best[key(miss)] = miss
    return [
        MatchReport(
            pattern.op.name, anchor.name, "rejected", error.reason, graphs.source_line(anchor)
        )
        for pattern, anchor, error in best.values()
    ]


def form_op(
    match: Match,
    context: Context,
    outcome: str,
    reports: list[MatchReport],
    function: Function | None = None,
) -> tuple[graphs.IrCall, list[str]]:
    """Replace a match with a call of its op, or of *function*, which calls the op.

    Adds the *outcome* to *reports*, and returns the call and the names of the replaced nodes.

    Raises:
        NoMatchError: no implementation other than native would run.
    """
    op, inner = match.pattern.op, match.inner
    anchor, names = inner[-1], [node.name for node in inner]
    whole = graphs.IrCall(anchor, op, match.values, (), ())
    trace = context.tracer.trace(op.impls[NATIVE], whole.fakes, function or op)
    if trace.failure:
        raise NoMatchError(trace.failure, WHOLE)
    for part in trace.info.calls.values():
        _check_kernel(part, context)
    outputs = inline(anchor.graph, trace, anchor, arguments(whole))
    with anchor.graph.inserting_before(anchor):
        for old, new in zip(match.outputs(), outputs, strict=True):
            if old is not None:
                graphs.substitute(old, _reshaped(anchor.graph, new, graphs.fake_of(old).shape))
    _erase(inner)
    node = outputs[0]
    while (call := graphs.ir_call(node)) is None:  # a part of the result, or a view of it
        node = node.all_input_nodes[0]
    reason, source = ", ".join(names), graphs.source_line(node)
    reports.append(MatchReport(op.name, node.name, outcome, reason, source))
    context.notes.append(f"{op.name} from {reason} ({source})")
    return call, names


def has_kernel(op: IrOp, context: Context) -> bool:
    """Return whether an implementation other than native comes first for some arguments."""
    policy = context.plan.policy(op)
    for sized in (policy, *(sized for _, sized in policy.by_size())):
        usable = [c for c in candidates(op, sized) if c.obstacle is None]
        if usable and usable[0].impl.provider != NATIVE:
            return True
    return False


def _check_kernel(call: graphs.IrCall, context: Context) -> None:
    """Raise NoMatchError unless an implementation other than native would run *call*."""
    try:
        selection = context.plan.select(call)
    except IrError as error:
        raise NoMatchError(str(error), WHOLE) from error
    if selection.provider == NATIVE:
        reasons = "; ".join(f"{r.provider}: {r.reason}" for r in selection.rejected)
        raise NoMatchError(f"no kernel for it: {reasons or 'native comes first'}", WHOLE)


def _reshaped(graph: Graph, node: Node, shape: torch.Size) -> Node:
    """Return *node*, reshaped if its users expect another shape."""
    fake = graphs.fake_of(node)
    if fake.shape == shape:
        return node
    view = graph.call_function(torch.ops.aten.reshape.default, (node, list(shape)))
    view.meta["val"] = graphs.computed_fake(view, compat.fake_mode_of([fake]))
    return view


def _erase(nodes: list[Node]) -> None:
    """Erase the replaced nodes; dead code elimination would keep collectives."""
    for node in dict.fromkeys(reversed(nodes)):  # ops of a match may share a node
        for user in [u for u in node.users if not graphs.is_op(u) and not u.users]:
            user.graph.erase_node(user)
        if not node.users:
            node.graph.erase_node(node)


# Fusion.


def fuse(info: graphs.GraphInfo, context: Context) -> None:
    """Replace every chain of ops for which a composite with a kernel exists."""
    patterns = [pattern for op in _composites(info, context) for pattern in derivation(op).patterns]

    def replace(match: Match) -> None:
        _check_parts(match, context)
        donate = _donations(match)
        call, names = form_op(match, context, "fused", context.report.fusions)
        if donate:
            graphs.annotate(call, donate=donate)
        context.fused_from[call.node.name] = names

    misses = replace_matches(info.nodes, patterns, replace, context)
    context.report.fusions += nearest(
        misses,
        key=lambda miss: (miss.anchor, miss.pattern.op),
        nearness=lambda miss: miss.error.matched,
        above=1,
    )


class FusionForm(NamedTuple):
    """One form of a composite that fusion searches for.

    Attributes:
        composite: the name of the op.
        variant: the flags and omitted arguments that distinguish this form from the others.
        ops: the names of its ops, in order.
        kernels: the providers that support it on this machine.
        failure: why no pattern could be derived, or an empty string.
    """

    composite: str
    variant: str
    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    failure: str


def fusion_table(registry: Registry | None = None) -> list[FusionForm]:
    """Return all forms of all composites in *registry*, by default the current one."""
    rows: list[FusionForm] = []
    registry = registry or current_registry()
    registry.ensure_ready()
    for op in (op for op in registry.ops.values() if op.composite):
        kernels = tuple(p for p in op.supported_providers() if p != NATIVE)
        derived = derivation(op)
        rows += [
            FusionForm(op.name, p.variant, _op_names(p), kernels, "") for p in derived.patterns
        ]
        rows += [FusionForm(op.name, "", (), kernels, why) for why in derived.failures]
    return rows


def _op_names(pattern: Pattern) -> tuple[str, ...]:
    calls = pattern.info.calls
    return tuple(calls[n].op.name if n in calls else str(n.target) for n in pattern.info.ops)


def _composites(info: graphs.GraphInfo, context: Context) -> list[IrOp]:
    """Return the composites that may be selected and whose ops are all in the graph."""
    present = {call.op for call in info.calls.values()}
    composites = []
    for op in dict.fromkeys(o for p in present for o in p.registry.ops.values() if o.composite):
        if has_kernel(op, context) and _parts_are(present, op):
            composites.append(op)
            context.notes += derivation(op).failures
    return composites


def _parts_are(present: set[IrOp], op: IrOp) -> bool:
    """Return whether the ops that the definition of *op* calls, or their parts, are in the graph.

    Names such as ``clip`` are skipped, because they may refer to a method or function of torch.
    """
    named = {n for n in op.native.__code__.co_names if n != op.name}
    named = {n for n in named if not (hasattr(Tensor, n) or hasattr(functional, n))}
    parts = [op.registry.ops[name] for name in sorted(named & op.registry.ops.keys())]
    return all(p in present or (p.composite and _parts_are(present, p)) for p in parts)


def _check_parts(match: Match, context: Context) -> None:
    """Raise NoMatchError if a part of the match must run a certain implementation."""
    for call in filter(None, map(graphs.ir_call, match.inner)):
        name = call.op.name
        if call.call_site:
            raise NoMatchError(f"the call of {name} sets its own priority", WHOLE)
        if call.autocast:
            raise NoMatchError(f"{name} is called under torch.autocast", WHOLE)
        for entry in context.plan.policy(call.op).priority:
            if entry.strict:
                raise NoMatchError(f"{name} must run {entry} [{entry.origin}]", WHOLE)


def _donations(match: Match) -> list[int]:
    """Return the parameters of the composite that were donated to its parts."""
    calls = filter(None, map(graphs.ir_call, match.inner))
    donated = {node for call in calls for node in donated_nodes(call)}
    return [i for i in match.pattern.op.activation_indices if match.values[i] in donated]
