"""Recognition: find ops in graphs of plain PyTorch operators, the graphs of unmodified models.

Each op declares its spellings (:mod:`opweave.ir.op`). A spelling is traced like a composite
and found by the same matcher, which compares the dtype of every intermediate result. It is replaced
with a call of the op if an implementation other than native would run. Graphs with gradients are
not changed.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from opweave.compile import compat
from opweave.compile.fuse import Miss, form_op, has_kernel, nearest, replace_matches
from opweave.compile.graph import GraphInfo, fake_of, strip_views, tensors_of
from opweave.compile.match import WHOLE, Match, NoMatchError, Pattern, derivation
from opweave.compile.plan import Context
from opweave.ir import current_registry
from opweave.ir.op import Spelling

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = 0.6  # the share of a pattern that must match for a near miss
_TOO_SMALL = "{} elements: generated code is faster below {:,}"


def recognize(info: GraphInfo, context: Context) -> None:
    """Replace spellings of ops with calls of the ops."""
    if context.report.is_differentiated:
        return
    nodes = _before_writes(info)

    def replace(match: Match) -> None:
        spelling = match.pattern.spelling
        assert spelling is not None
        _check_arguments(match, spelling)
        _check_size(match, spelling, context)
        reports = context.report.recognitions
        call, names = form_op(match, context, "recognized", reports, spelling.call)
        context.recognized_from[call.node.name] = names

    misses = replace_matches(nodes, _patterns(nodes, context), replace, context, skip_parts=True)
    context.report.recognitions += nearest(
        misses, key=lambda miss: miss.anchor, nearness=_share, above=NEAR
    )


def _share(miss: Miss) -> float:
    """Return the share of the pattern that matched."""
    return min(miss.error.matched / len(miss.pattern.info.nodes), 1.0)


def _before_writes(info: GraphInfo) -> list[Node]:
    """Return the operators before the first one that writes to memory.

    The list is empty for the joint graph of a training step, whose backward reads inner values.
    """
    if info.has_tangents:
        return []
    end = info.order[info.writes[0]] if info.writes else None
    return [node for node in info.nodes[:end] if node.op == "call_function"]


def _patterns(nodes: list[Node], context: Context) -> list[Pattern]:
    """Return the patterns of the ops that could run a kernel, in the dtypes of the graph."""
    tensors = [tensor for node in nodes for tensor in tensors_of(node)]
    dtypes = {tensor.dtype for tensor in tensors}
    largest = max((n for t in tensors if isinstance(n := t.numel(), int)), default=0)
    present = {compat.function_name(node) for node in nodes}
    patterns: list[Pattern] = []
    for op in list(current_registry().ops.values()):
        spellings = [s for s in op.spellings if not s.marker or s.marker in present]
        if not spellings or not has_kernel(op, context):
            continue
        fewest = min(spelling.elements for spelling in spellings)
        if context.plan.options.codegen and largest < fewest:
            context.notes.append(f"{op.name}: {_TOO_SMALL.format(largest, fewest)}")
            continue
        for spelling in spellings:
            for dtype in (d for d in DTYPES if d in dtypes):
                derived = derivation(op, spelling, dtype=dtype)
                context.notes += derived.failures
                patterns += derived.patterns
    return patterns


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
