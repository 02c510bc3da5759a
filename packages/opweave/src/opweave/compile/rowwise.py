"""Row-wise analysis: which nodes compute each row of the result from the same row of the operands.

A row is an index of dimension 0, that is, a token. A row-wise node applied to some of the rows
returns those rows of the full result.

==========================  ====================================================================
node                        is row-wise if
==========================  ====================================================================
IR op                       its native implementation has the trait ``rowwise``, or its trace
                            contains only row-wise nodes (``static_quant_fp8`` with one scale)
pointwise aten op           each operand has a row per token, or is broadcast to all tokens
reduction, sort, softmax    it is not along dimension 0
view, slice, concatenation  dimension 0 does not change
==========================  ====================================================================
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from opweave.compile import compat
from opweave.compile.graph import (
    VIEWS,
    IrCall,
    fake_of,
    has_fake,
    ir_call,
    operands,
    tensors_of,
)
from opweave.compile.tracing import Tracer, arguments
from opweave.ir.priority import NATIVE
from opweave.ir.rules import ROWWISE

aten = torch.ops.aten
Size = int | SymInt

# The position of the ``dim`` argument.
ALONG = {
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten.all.dim: 1,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten.any.dim: 1,
    aten.argmax.default: 1,
    aten.argmin.default: 1,
    aten.cumsum.default: 1,
    aten.logsumexp.default: 1,
    aten.mean.dim: 1,
    aten.sort.default: 1,
    aten.std.correction: 1,
    aten.sum.dim_IntList: 1,
    aten.topk.default: 2,
    aten.var.correction: 1,
    aten.var_mean.correction: 1,
}
PARTS = {
    aten.cat.default: 1,
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.squeeze.dim: 1,
    aten.squeeze.dims: 1,
    aten.unbind.int: 1,
}
# Operators that take the sizes of their result.
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
}
# Pointwise operators that torch does not tag as pointwise.
POINTWISE = {
    aten._to_copy.default,
    aten.alias.default,
    aten.copy.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}


def row_operands(node: Node, tokens: Size, tracer: Tracer) -> set[Node] | None:
    """Return the operands of *node* that have a row for each row of the result.

    Args:
        node: the node.
        tokens: the number of rows.
        tracer: traces ops without the trait, which may be row-wise for these arguments.

    Returns:
        The operands, or None if *node* is not row-wise. All rows of every other operand are needed.
    """
    results, known = tensors_of(node), all(map(has_fake, node.all_input_nodes))
    if not results or not known or not all(_has_rows(result, tokens) for result in results):
        return None
    if node.target is operator.getitem:
        return set(node.all_input_nodes)
    call = ir_call(node)
    if call is not None:
        return _of_op(call, tokens, tracer)
    rule = _rule(node)
    return rule(node, tokens) if rule else None


def keeps_rows(node: Node) -> bool:
    """Return whether *node* may be row-wise, depending on its arguments."""
    call = ir_call(node)
    if call is not None:
        return ROWWISE in call.op.impls[NATIVE].traits
    return node.target is operator.getitem or _rule(node) is not None


def is_view(node: Node) -> bool:
    """Return whether *node* only rearranges its operands: a view, slice or concatenation."""
    return node.target in _VIEWS


def known_equal(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal for all values of the dynamic sizes."""
    return a is b or bool(statically_known_true(a == b))


def _along(node: Node, tokens: Size) -> set[Node] | None:
    position = ALONG[node.target] if node.target in ALONG else PARTS[node.target]  # type: ignore[index]
    dims = operands(node)[position]
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    if not dims or any(dim in (0, -_tensors(node)[0].ndim) for dim in dims):
        return None
    return _all_rows(node, tokens)


def _unsqueeze(node: Node, tokens: Size) -> set[Node] | None:
    return None if node.args[1] in (0, -fake_of(node).ndim) else _all_rows(node, tokens)


def _permutation(node: Node, tokens: Size) -> set[Node] | None:
    dims: Any = node.args[1] if node.target is aten.permute.default else node.args[1:]
    count = fake_of(node).ndim
    moved = [dim % count for dim in dims]
    stays = moved[0] == 0 if node.target is aten.permute.default else 0 not in moved
    return _all_rows(node, tokens) if stays else None


def _padding(node: Node, tokens: Size) -> set[Node] | None:
    amounts: Any = node.args[1]
    return _all_rows(node, tokens) if len(amounts) < 2 * fake_of(node).ndim else None


def _reshape(node: Node, tokens: Size) -> set[Node] | None:
    result, given = fake_of(node), _tensors(node)[0]
    if node.target is aten.expand.default and given.ndim != result.ndim:
        return None
    known = all(isinstance(size, int) for size in result.shape[1:])
    return _all_rows(node, tokens) if known else None


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


def _of_op(call: IrCall, tokens: Size, tracer: Tracer) -> set[Node] | None:
    rows = _rows_of_arguments(call, tokens)
    if rows is None or ROWWISE in call.op.impls[NATIVE].traits:
        return rows
    return rows if _is_rowwise_inside(call, rows, tokens, tracer) else None


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
    given = iter(arguments(call))
    inside: set[Node] = set()
    for node in trace.info.nodes:
        sharded = inside.intersection(node.all_input_nodes)
        if node.op == "placeholder":
            inside |= {node} if next(given) in rows else set()
        elif node.op == "output":
            return sharded == set(node.all_input_nodes)
        elif sharded:
            needed = row_operands(node, tokens, tracer)
            if needed is None or not sharded <= needed:
                return False
            inside.add(node)
    return False


def _rule(node: Node) -> Callable[[Node, Size], set[Node] | None] | None:
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return None
    tags = node.target.tags
    if node.target in _RULES:
        return _RULES[node.target]
    if torch.Tag.nondeterministic_seeded in tags or compat.is_mutable(node.target):
        return None
    return _pointwise if node.target in POINTWISE or torch.Tag.pointwise in tags else None


_RULES: dict[object, Callable[[Node, Size], set[Node] | None]] = {
    **dict.fromkeys([*ALONG, *PARTS], _along),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys([aten.permute.default, aten.transpose.int], _permutation),
    aten.constant_pad_nd.default: _padding,
    aten.unsqueeze.default: _unsqueeze,
}
_VIEWS: set[object] = {*VIEWS, *PARTS, *RESHAPES, operator.getitem}
_VIEWS |= {aten.permute.default, aten.transpose.int, aten.copy.default}


def _has_rows(value: Tensor, tokens: Size) -> bool:
    return value.ndim > 0 and known_equal(value.shape[0], tokens)


def _tensors(node: Node) -> list[Tensor]:
    return [fake for n in node.all_input_nodes if isinstance(fake := fake_of(n), Tensor)]
