"""Recognition: find ops in graphs of plain PyTorch operators, the graphs of unmodified models.

Each op declares its spellings (:mod:`opweave.ir.op`). A spelling is traced like a composite
and found by the same matcher, which compares the dtype of every intermediate result. It is replaced
with a call of the op if an implementation other than native would run. Graphs with gradients are
not changed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from opweave.compile import compat
from opweave.compile.fuse import check_kernel, erase, has_kernel, reshaped
from opweave.compile.graph import (
    GraphInfo,
    fake_of,
    ir_call,
    kind,
    source_line,
    strip_views,
    substitute,
    tensors_of,
)
from opweave.compile.patterns import WHOLE, Match, NoMatchError, Pattern, derivation, find
from opweave.compile.plan import Context
from opweave.compile.report import MatchReport
from opweave.compile.tracing import AtenTrace, inline, variables
from opweave.ir import IrOp, current_registry
from opweave.ir.op import Spelling
from opweave.ir.priority import NATIVE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = 0.6  # the share of a pattern that must match for a near miss
_TOO_SMALL = "{} elements: generated code is faster below {:,}"


class Form(NamedTuple):
    """One pattern of one spelling."""

    pattern: Pattern
    spelling: Spelling


def recognize(info: GraphInfo, context: Context) -> None:
    """Replace spellings of ops with calls of the ops."""
    if context.report.is_differentiated:
        return
    nodes = _before_writes(info)
    forms: dict[object, list[Form]] = {}
    for form in _forms(nodes, context):
        forms.setdefault(kind(form.pattern.anchor), []).append(form)
    chances = [(anchor, form) for anchor in reversed(nodes) for form in forms.get(kind(anchor), ())]
    used: set[Node] = set()
    partial: set[tuple[IrOp, Node]] = set()  # parts of a larger form that was rejected
    misses: dict[Node, tuple[float, MatchReport]] = {}  # the nearest miss per anchor
    for anchor, form in sorted(chances, key=lambda chance: -chance[1].pattern.size):
        op = form.pattern.op
        if anchor in used or (op, anchor) in partial:
            continue
        try:
            used |= _recognize(info.graph, form, anchor, used, context)
        except NoMatchError as miss:
            partial |= {(op, node) for node in miss.inner if node is not anchor}
            share = min(miss.matched / len(form.pattern.info.nodes), 1.0)
            if share > misses[anchor][0] if anchor in misses else share > NEAR:
                report = MatchReport(
                    op.name, anchor.name, "rejected", miss.reason, source_line(anchor)
                )
                misses[anchor] = share, report
    context.report.recognitions += [miss for node, (_, miss) in misses.items() if node not in used]


def _before_writes(info: GraphInfo) -> list[Node]:
    """Return the operators before the first one that writes to memory.

    The list is empty for the joint graph of a training step, whose backward reads inner values.
    """
    if info.has_tangents:
        return []
    end = info.order[info.writes[0]] if info.writes else None
    return [node for node in info.nodes[:end] if node.op == "call_function"]


def _forms(nodes: list[Node], context: Context) -> list[Form]:
    """Return the forms of the ops that could run a kernel, in the dtypes of the graph."""
    tensors = [tensor for node in nodes for tensor in tensors_of(node)]
    dtypes = {tensor.dtype for tensor in tensors}
    largest = max((n for t in tensors if isinstance(n := t.numel(), int)), default=0)
    present = {compat.function_name(node) for node in nodes}
    found = []
    for op in list(current_registry().ops.values()):
        wanted = [s for s in op.spellings if not s.marker or s.marker in present]
        if not wanted or not has_kernel(op, context):
            continue
        fewest = min(spelling.elements for spelling in wanted)
        if context.plan.options.codegen and largest < fewest:
            context.notes.append(f"{op.name}: {_TOO_SMALL.format(largest, fewest)}")
            continue
        for spelling in wanted:
            for dtype in (d for d in DTYPES if d in dtypes):
                derived = derivation(op, spelling, dtype=dtype)
                context.notes += derived.failures
                found += [Form(pattern, spelling) for pattern in derived.patterns]
    return found


def _recognize(
    graph: Graph, form: Form, anchor: Node, used: set[Node], context: Context
) -> set[Node]:
    """Replace the match that ends in *anchor*, and return the replaced operators.

    Raises:
        NoMatchError: the form does not match, or no kernel would run.
    """
    pattern, op = form.pattern, form.pattern.op
    match = find(pattern, anchor, context.tracer)
    replaced = set(match.inner)
    if used & replaced:
        raise NoMatchError("a part of it belongs to another op", 1)
    _check_arguments(match, form.spelling)
    _check_size(match, form.spelling, context)
    trace = _call(match, form.spelling, context)
    names = [node.name for node in match.inner]
    (output,) = _replace(graph, match, trace, anchor)
    call = _op_node(output)
    context.recognized_from[call.name] = names
    context.report.recognitions.append(
        MatchReport(op.name, call.name, "recognized", ", ".join(names), source_line(call))
    )
    context.notes.append(f"{op.name} from {', '.join(names)} ({source_line(call)})")
    return replaced


def _check_arguments(match: Match, spelling: Spelling) -> None:
    """Raise NoMatchError if an argument shows that the match is another computation.

    This is so if a constant is computed, or if the first argument is widened from 16 bits: the op
    takes 16 bits, and this spelling rounds elsewhere.
    """
    for name, value in zip(match.pattern.op.schema.names, match.values, strict=True):
        origin = strip_views(value)
        if name in spelling.constants and origin.op not in ("placeholder", "get_attr"):
            raise NoMatchError(f"{name} is computed, by {origin.name}", WHOLE)
    first = strip_views(match.values[0])
    if compat.function_name(first) == "convert_element_type":
        before, after = (fake_of(node).dtype for node in (first.args[0], first))
        if before in DTYPES and before.itemsize < after.itemsize:
            raise NoMatchError(f"its input is widened, by {first.name}", WHOLE, tuple(match.inner))


def _check_size(match: Match, spelling: Spelling, context: Context) -> None:
    """Raise NoMatchError if generated code is faster than a kernel."""
    size = fake_of(match.values[0]).numel()
    if context.plan.options.codegen and not statically_known_true(size >= spelling.elements):
        reason = _TOO_SMALL.format(size, spelling.elements)
        raise NoMatchError(reason, WHOLE, tuple(match.inner))


def _call(match: Match, spelling: Spelling, context: Context) -> AtenTrace:
    """Return the graph that calls the op with the arguments of the match.

    Raises:
        NoMatchError: no implementation other than native would run.
    """
    op = match.pattern.op
    fakes = tuple(torch.fx.map_arg(list(match.values), fake_of))
    trace = context.tracer.trace(op.impls[NATIVE], fakes, spelling.call or op)
    if trace.failure:
        raise NoMatchError(trace.failure, WHOLE)
    for call in trace.info.calls.values():
        check_kernel(call, context)
    return trace


def _replace(graph: Graph, match: Match, trace: AtenTrace, anchor: Node) -> list[Node]:
    given = [value for value in match.values if isinstance(value, Node)]
    wanted = variables([fake_of(node) for node in given])
    if len(wanted) != len(trace.info.inputs):
        raise NoMatchError("its arguments are not tensors and numbers", WHOLE)
    outputs = inline(graph, trace, anchor, given)
    mode = compat.fake_mode_of([fake_of(node) for node in given])
    with graph.inserting_before(anchor), mode or compat.FakeTensorMode(), torch.no_grad():
        for old, new in zip(match.outputs(), outputs, strict=True):
            if old is not None:
                substitute(old, reshaped(graph, new, fake_of(old).shape))
    erase(match.inner)
    return outputs


def _op_node(node: Node) -> Node:
    """Return the call of the op whose result *node* is, or is a view of."""
    while ir_call(node) is None:
        node = next(n for n in node.all_input_nodes if isinstance(fake_of(n), Tensor))
    return node
