"""Mixture of experts with two matrix products per expert with tokens.

The number of tokens per expert is read on the host, so this cannot be traced: compiled code calls
it as an opaque op, and calls that need gradients use native.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opweave.ir import IrOp, ops
from opweave.ir.ops.fused_experts import Routed, bound_activation, check_experts, combine, route
from opweave.ir.ops.fused_experts_quant import ExpertFunction, PreparedExperts, low_bit_experts


def dense_experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str,
    expert_map: Tensor | None, w13_bias: Tensor | None, w2_bias: Tensor | None,
    apply_router_weight_on_input: bool, *limits: float | None,
) -> PreparedExperts:  # fmt: skip
    """Return the experts of ``fused_experts``."""
    check_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    act = bound_activation(activation, *limits)
    if activation == "silu":  # the same function, for which there may be a kernel
        act = ops.silu_and_mul
    return PreparedExperts(routed, len(w13), _product(w13, w13_bias), act, _product(w2, w2_bias))


def _product(weight: Tensor, bias: Tensor | None) -> ExpertFunction:
    def product(expert: int, rows: Tensor) -> Tensor:
        out: Tensor = ops.linear(rows, weight[expert], None if bias is None else bias[expert])
        return out

    return product


def outputs_of(experts: PreparedExperts) -> Tensor:
    """Return the outputs of the experts: ``(T, K, hidden)``, 0 where a token has no expert."""
    routed = experts.routed
    outputs = routed.x.new_zeros(routed.valid.numel(), routed.x.shape[1])
    for expert, slots, tokens in _groups(routed, experts.num_experts):
        hidden = experts.act(experts.first(expert, routed.x[tokens]))
        outputs[slots] = experts.second(expert, hidden)
    return torch.unflatten(outputs, 0, tuple(routed.valid.shape))


def _groups(routed: Routed, num_experts: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return (expert, slots in ``(T * K,)``, tokens) for each expert with tokens."""
    expert_of = torch.where(routed.valid, routed.experts, num_experts).flatten()
    counts = expert_of.bincount(minlength=num_experts + 1).tolist()
    slots = expert_of.argsort(stable=True)
    tokens = slots // max(routed.valid.shape[1], 1)
    split = torch.split_with_sizes
    parts = zip(split(slots, counts), split(tokens, counts), strict=True)
    all_groups = zip(range(num_experts), counts, parts, strict=False)  # not those without expert
    return [(expert, *part) for expert, count, part in all_groups if count]


def _register(op: IrOp, prepare: Callable[..., PreparedExperts]) -> None:
    def implementation(*args: Any, **kwargs: Any) -> Tensor:
        experts = prepare(*op.bind(*args, **kwargs))
        return combine(outputs_of(experts), experts.routed)

    implementation.__signature__ = inspect.signature(op.native)  # type: ignore[attr-defined]
    op.register_impl("aten")(implementation)


_register(ops.fused_experts, dense_experts)
_register(ops.fused_experts_quant, low_bit_experts)
