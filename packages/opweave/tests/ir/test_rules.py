"""Rules: what they accept, and the reason that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import rules
from opweave.ir.errors import (
    PredicateSignatureError,
)

pytestmark = pytest.mark.usefixtures("registry")


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Multiply *x* by *factor*.

    Elementwise.
    """
    return x * factor


@pytest.fixture
def op(registry: ir.Registry) -> ir.IrOp:
    return ir.register_op(scaled)


@pytest.mark.parametrize(
    "make",
    [
        rules.cpu,
        rules.contiguous,
        lambda: rules.dtype("x"),
        lambda: rules.ndim("x"),
        lambda: rules.one_of("factor"),
        lambda: rules.dtype("x", "float32"),  # type: ignore[arg-type]
        lambda: rules.ndim("x", "a"),  # type: ignore[arg-type]
        lambda: rules.last_dim_multiple_of("x", 0),
        lambda: rules.cpu("x") & (lambda x: True),  # type: ignore[operator]
        lambda: rules.cpu("x") | None,  # type: ignore[operator]
    ],
)
def test_a_rule_about_nothing_or_nonsense_is_refused(
    op: ir.IrOp, make: Callable[[], rules.Rule]
) -> None:
    with pytest.raises((PredicateSignatureError, TypeError)):
        op.register_impl("alpha", supports_args=make())(scaled)


RULES: list[tuple[rules.Rule, dict[str, Any], str | None]] = [
    (rules.dtype("x", torch.float32), {}, None),
    (rules.dtype("x", torch.float16, torch.bfloat16), {}, "float32 (supports float16, bfloat16)"),
    (rules.dtype("w", torch.float16), {}, None),  # None passes
    (rules.dtype("w", torch.float16), {"w": torch.ones(1)}, "w: float32"),
    (rules.same_dtype("x", "w"), {}, None),
    (rules.same_dtype("x", "w"), {"w": torch.ones(1).double()}, "float64"),
    (rules.same_dtype("w", "x", "y"), {"y": torch.ones(1).double()}, "float64"),
    (rules.same_shape("x", "y"), {}, None),
    (rules.same_shape("x", "y"), {"y": torch.ones(3)}, "(3,)"),
    (rules.same_device("x", "y"), {"y": torch.ones(2, 4, device="meta")}, "meta"),
    (rules.cpu("x", "w"), {}, None),
    (rules.cpu("x"), {"x": torch.ones(1, device="meta")}, "on meta (supports cpu)"),
    (rules.cuda("x"), {}, "on cpu (supports cuda)"),
    (rules.device("meta", "x"), {}, "supports meta"),
    (rules.has_values("x"), {}, None),
    (rules.has_values("x"), {"x": torch.ones(1, device="meta")}, "on meta (supports tensors with"),
    (rules.contiguous("x"), {"x": torch.ones(4, 2).t()}, "strides (1, 2)"),
    (rules.unit_stride("x"), {"x": torch.ones(4, 8)[:, :4]}, None),
    (rules.unit_stride("x"), {"x": torch.ones(4, 8)[:, ::2]}, "strides (8, 2)"),
    (rules.ndim("x", 1, 2), {}, None),
    (rules.ndim("x", 1, 3), {}, "2-d (supports 1 or 3-d)"),
    (rules.last_dim_multiple_of("x", 4), {}, None),
    (rules.last_dim_multiple_of("x", 3), {}, "multiples of 3"),
    (rules.last_dim_multiple_of("x", 1), {"x": torch.tensor(1.0)}, "multiples of 1"),
    (rules.is_none("w"), {}, None),
    (rules.is_none("w"), {"w": torch.ones(1)}, "w: a tensor (supports None)"),
    (rules.not_none("w"), {}, "w: None (supports a value)"),
    (rules.one_of("kind", "a", "b"), {}, None),
    (rules.one_of("kind", "b"), {}, "kind: 'a' (supports 'b')"),
    (rules.custom(lambda x, y, w=None, kind="a": kind == "a", "because"), {}, None),
    (rules.custom(lambda x, y, w=None, kind="a": kind == "b", "because"), {}, "because"),
    (rules.cpu("x") & rules.is_none("w") & rules.ndim("x", 1), {}, "2-d"),
    (rules.cuda("x") | rules.ndim("x", 2), {}, None),
    (rules.cuda("x") | rules.ndim("x", 1), {}, "x: on cpu (supports cuda) and x: 2-d"),
    ((rules.cuda("x") | rules.is_none("w")) & rules.ndim("y", 2), {}, None),
]


@pytest.mark.parametrize(("rule", "changes", "reason"), RULES)
def test_a_rule_accepts_or_gives_the_reason(
    registry: ir.Registry, rule: rules.Rule, changes: dict[str, Any], reason: str | None
) -> None:
    def ruled(x: Tensor, y: Tensor, w: Tensor | None = None, kind: str = "a") -> Tensor:
        return x + 0

    op = ir.register_op(ruled)
    op.register_impl("alpha", supports_args=rule)(ruled)
    op.set_default(["alpha"])
    arguments = {"x": torch.ones(2, 4), "y": torch.ones(2, 4), "w": None, "kind": "a", **changes}
    verdict = {v.provider: v for v in ir.explain(op, **arguments).verdicts}["alpha"]
    if reason is None:
        assert verdict.outcome == "chosen"
    else:
        assert verdict.outcome == "rejected"
        assert reason in verdict.reason
