"""Fusion: replace chains of ops with the composite that is defined as that chain.

A composite is formed only if an implementation other than native supports the arguments. Patterns
are derived from the composites (:mod:`opweave.compile.patterns`). Larger patterns are tried first
in the whole graph, so that a chain of two ops does not break up a chain of three.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from opweave.compile import compat
from opweave.compile.graph import (
    GraphInfo,
    IrCall,
    call_arguments,
    fake_of,
    ir_call,
    is_op,
    kind,
    source_line,
    substitute,
)
from opweave.compile.passes import donated_nodes
from opweave.compile.patterns import WHOLE, Match, NoMatchError, Pattern, derivation, find
from opweave.compile.plan import Context
from opweave.compile.report import MatchReport
from opweave.ir import IrOp, Registry, current_registry
from opweave.ir.errors import IrError
from opweave.ir.priority import NATIVE
from opweave.ir.selection import candidates


def fuse(info: GraphInfo, context: Context) -> None:
    """Replace every chain of ops for which a composite with a kernel exists."""
    patterns: dict[object, list[Pattern]] = {}
    for op in _composites(info, context):
        for pattern in derivation(op).patterns:
            patterns.setdefault(kind(pattern.anchor), []).append(pattern)
    anchors = [node for node in reversed(info.nodes) if kind(node) in patterns]
    chances = [(anchor, pattern) for anchor in anchors for pattern in patterns[kind(anchor)]]
    used: set[Node] = set()
    misses: dict[Node, dict[str, NoMatchError]] = {anchor: {} for anchor in anchors}
    for anchor, pattern in sorted(chances, key=lambda chance: -chance[1].size):
        if anchor not in used:
            _try(info.graph, pattern, anchor, used, misses[anchor], context)
    for anchor in anchors:
        if anchor not in used:
            context.report.fusions += [
                MatchReport(name, anchor.name, "rejected", miss.reason, source_line(anchor))
                for name, miss in misses[anchor].items()
                if miss.matched > 1
            ]


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
        found = derivation(op)
        rows += [FusionForm(op.name, p.variant, _op_names(p), kernels, "") for p in found.patterns]
        rows += [FusionForm(op.name, "", (), kernels, why) for why in found.failures]
    return rows


def _op_names(pattern: Pattern) -> tuple[str, ...]:
    calls = pattern.info.calls
    return tuple(calls[n].op.name if n in calls else str(n.target) for n in pattern.info.ops)


def _composites(info: GraphInfo, context: Context) -> list[IrOp]:
    """Return the composites that may be selected and whose ops are all in the graph."""
    present = {call.op for call in info.calls.values()}
    found = []
    for op in dict.fromkeys(o for p in present for o in p.registry.ops.values() if o.composite):
        if has_kernel(op, context) and _parts_are(present, op):
            found.append(op)
            context.notes += derivation(op).failures
    return found


def has_kernel(op: IrOp, context: Context) -> bool:
    """Return whether an implementation other than native comes first for some arguments."""
    policy = context.plan.policy(op)
    for each in (policy, *(each for _, each in policy.by_size())):
        usable = [c for c in candidates(op, each) if c.obstacle is None]
        if usable and usable[0].impl.provider != NATIVE:
            return True
    return False


def _parts_are(present: set[IrOp], op: IrOp) -> bool:
    """Return whether the ops that the definition of *op* calls, or their parts, are in the graph.

    Names such as ``clip`` are skipped, because they may refer to a method or function of torch.
    """
    named = {n for n in op.native.__code__.co_names if n != op.name}
    named = {n for n in named if not (hasattr(Tensor, n) or hasattr(functional, n))}
    parts = [op.registry.ops[name] for name in sorted(named & op.registry.ops.keys())]
    return all(p in present or (p.composite and _parts_are(present, p)) for p in parts)


def _try(
    graph: Graph,
    pattern: Pattern,
    anchor: Node,
    used: set[Node],
    misses: dict[str, NoMatchError],
    context: Context,
) -> None:
    op = pattern.op
    try:
        match = find(pattern, anchor, context.tracer)
        if used & set(match.inner):
            raise NoMatchError("a part of it is in another fusion", 1)
        _check_parts(match, context)
        check_kernel(IrCall(match.inner[-1], op, match.values, (), ()), context)
    except NoMatchError as miss:
        nearest = misses.get(op.name)
        if nearest is None or miss.matched > nearest.matched:
            misses[op.name] = miss
        return
    used |= set(match.inner)
    names = [node.name for node in match.inner]
    new = _replace(graph, match, anchor)
    context.fused_from[new.name] = names
    source = source_line(new)
    context.report.fusions.append(MatchReport(op.name, new.name, "fused", ", ".join(names), source))
    context.notes.append(f"{op.name} from {', '.join(names)} ({source})")


def _check_parts(match: Match, context: Context) -> None:
    """Raise NoMatchError if a part of the match must run a certain implementation."""
    for call in filter(None, map(ir_call, match.inner)):
        name = call.op.name
        if call.call_site:
            raise NoMatchError(f"the call of {name} sets its own priority", WHOLE)
        if call.autocast:
            raise NoMatchError(f"{name} is called under torch.autocast", WHOLE)
        for entry in context.plan.policy(call.op).priority:
            if entry.strict:
                raise NoMatchError(f"{name} must run {entry} [{entry.origin}]", WHOLE)


def check_kernel(call: IrCall, context: Context) -> None:
    """Raise NoMatchError unless an implementation other than native would run *call*."""
    try:
        selection = context.plan.select(call)
    except IrError as error:
        raise NoMatchError(str(error), WHOLE) from error
    if selection.provider == NATIVE:
        reasons = "; ".join(f"{r.provider}: {r.reason}" for r in selection.rejected)
        raise NoMatchError(f"no kernel for it: {reasons or 'native comes first'}", WHOLE)


def _replace(graph: Graph, match: Match, anchor: Node) -> Node:
    op, outputs = match.pattern.op, match.outputs()
    args, kwargs = call_arguments(op, match.values)
    fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), fake_of)
    target: Any = op.torch_op
    donate = _donations(match)
    if donate:
        target, kwargs = op.torch_ops.annotated, {**kwargs, "donate": donate}
    mode = compat.fake_mode_of([fake_of(v) for v in match.values if isinstance(v, Node)])
    with graph.inserting_before(anchor), mode or compat.FakeTensorMode(), torch.no_grad():
        new = graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in anchor.meta.items() if k not in ("val", "tensor_meta")}
        new.meta["val"] = op.fake(*fake_args, **fake_kwargs)
        for position, output in enumerate(outputs):
            if output is not None:
                made = _part(graph, new, position) if op.schema.returns_tuple else new
                substitute(output, reshaped(graph, made, fake_of(output).shape))
    erase(match.inner)
    return new


def erase(nodes: list[Node]) -> None:
    """Erase the replaced nodes; dead code elimination would keep collectives."""
    for node in dict.fromkeys(reversed(nodes)):  # ops of a match may share a node
        for user in [u for u in node.users if not is_op(u) and not u.users]:
            user.graph.erase_node(user)
        if not node.users:
            node.graph.erase_node(node)


def _part(graph: Graph, node: Node, position: int) -> Node:
    part = graph.call_function(operator.getitem, (node, position))
    part.meta["val"] = node.meta["val"][position]
    return part


def reshaped(graph: Graph, node: Node, shape: torch.Size) -> Node:
    """Return *node*, reshaped if its users expect another shape."""
    fake = fake_of(node)
    if fake.shape == shape:
        return node
    view = graph.call_function(torch.ops.aten.reshape.default, (node, list(shape)))
    view.meta["val"] = fake.reshape(shape)
    return view


def _donations(match: Match) -> list[int]:
    """Return the parameters of the composite that were donated to its parts."""
    given = {
        donated
        for call in filter(None, map(ir_call, match.inner))
        for donated in donated_nodes(call)
    }
    return [i for i in match.pattern.op.activation_indices if match.values[i] in given]
