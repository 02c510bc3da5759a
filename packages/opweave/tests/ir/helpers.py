"""The declared ops with arguments, and ways to look at results and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ir.workloads import tuple_of
from opweave import ir

# One op of each kind: optional arguments, in place, integers only, strings, several tensors.
NAMES = (
    "advance_step_flashattn", "fused_add_rms_norm", "gelu_and_mul", "linear", "rms_norm",
    "rotary_embedding", "varlen_attention",
)  # fmt: skip
FLOAT_NAMES = [name for name in NAMES if name != "advance_step_flashattn"]
each_op = pytest.mark.parametrize("name", NAMES)
each_float_op = pytest.mark.parametrize("name", FLOAT_NAMES)
each_float_provider = pytest.mark.parametrize(
    ("name", "provider"),
    [(n, p) for n in FLOAT_NAMES for p in getattr(ir.ops, n).supported_providers()],
)


def op_of(name: str) -> ir.IrOp:
    found: ir.IrOp = getattr(ir.ops, name)
    return found


def inputs(op: ir.IrOp, *, grad: bool = False, **options: Any) -> tuple[Any, ...]:
    values = op.generate_inputs(**{"num_tokens": 4, **options})
    return tuple(
        v.detach().requires_grad_(grad) if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in values
    )


def assert_equal(found: Any, expected: Any) -> None:
    for a, b in zip(tuple_of(found), tuple_of(expected), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def on_tensors(function: Callable[..., Any], values: tuple[Any, ...]) -> tuple[Any, list[Tensor]]:
    """*function* of the tensors among *values* only, and those tensors."""
    places = [i for i, v in enumerate(values) if isinstance(v, Tensor)]

    def call(*tensors: Tensor) -> Any:
        filled = list(values)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        return function(*filled)

    return call, [values[i] for i in places]


def overloads(op: ir.IrOp) -> dict[str, Callable[..., Any]]:
    found = {"default": op.torch_op, "annotated": op.torch_ops.annotated}
    if op.torch_ops.maybe_inplace is not None:
        found["maybe_inplace"] = op.torch_ops.maybe_inplace
    return found


def ir_nodes(graph: torch.fx.Graph, op: ir.IrOp) -> int:
    targets = list(overloads(op).values())
    return sum(any(node.target is t for t in targets) for node in graph.nodes)


def calls(graph: torch.fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op in ("call_function", "call_method")]
