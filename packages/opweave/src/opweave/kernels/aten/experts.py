"""Mixture of experts with two matrix products per expert with tokens.

The number of tokens per expert is read on the host, so this cannot be traced: compiled code calls
it as an opaque op, and calls that need gradients use native.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.fused_experts import Routed, bound_activation, check_experts, combine, route
from opweave.ir.ops.fused_experts_quant import (
    ExpertFunction,
    check_experts_quant,
    low_bit_product,
)


@ops.fused_experts.register_impl("aten")
def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> Tensor:
    act = bound_activation(activation, alpha, beta, limit)
    if activation == "silu":
        act = ops.silu_and_mul  # the same function, for which there may be a kernel
    check_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    first, second = dense_products(w13, w2, w13_bias, w2_bias)
    outputs = of_each_expert(routed, len(w13), first, act, second)
    return combine(outputs, routed)


def dense_products(
    w13: Tensor, w2: Tensor, w13_bias: Tensor | None, w2_bias: Tensor | None
) -> tuple[ExpertFunction, ExpertFunction]:
    """Return the two products of each expert."""

    def first(expert: int, rows: Tensor) -> Tensor:
        bias = None if w13_bias is None else w13_bias[expert]
        found: Tensor = ops.linear(rows, w13[expert], bias)
        return found

    def second(expert: int, rows: Tensor) -> Tensor:
        bias = None if w2_bias is None else w2_bias[expert]
        found: Tensor = ops.linear(rows, w2[expert], bias)
        return found

    return first, second


@ops.fused_experts_quant.register_impl("aten")
def fused_experts_quant(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w13_offset: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    w2_offset: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_format: str = "w4a16",
    w2_format: str = "w4a16",
    activation: str = "silu",
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> Tensor:
    act = bound_activation(activation, alpha, beta, limit)
    if activation == "silu":
        act = ops.silu_and_mul
    check_experts_quant(
        x, w13, w13_scale, w13_offset, w2, w2_scale, w2_offset, topk_weights, topk_ids,
        w13_format, w2_format, activation,
    )  # fmt: skip
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    first = low_bit_product(w13, w13_scale, w13_offset, w13_format)
    second = low_bit_product(w2, w2_scale, w2_offset, w2_format)
    outputs = of_each_expert(routed, len(w13), first, act, second)
    return combine(outputs, routed)


def of_each_expert(
    routed: Routed,
    num_experts: int,
    first: ExpertFunction,
    act: Callable[[Tensor], Tensor],
    second: ExpertFunction,
) -> Tensor:
    """Return the outputs of the experts: ``(T, K, hidden)``, 0 where a token has no expert.

    Args:
        routed: the tokens.
        num_experts: the number of experts in the weights.
        first: the product before the activation.
        act: the activation.
        second: the product after it.
    """
    outputs = routed.x.new_zeros(routed.valid.numel(), routed.x.shape[1])
    for expert, slots, tokens in _groups(routed, num_experts):
        outputs[slots] = second(expert, act(first(expert, routed.x[tokens])))
    return torch.unflatten(outputs, 0, tuple(routed.valid.shape))


def _groups(routed: Routed, num_experts: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return (expert, slots in ``(T * K,)``, tokens) for each expert with tokens."""
    expert_of = torch.where(routed.valid, routed.experts, num_experts).flatten()
    counts = expert_of.bincount(minlength=num_experts + 1).tolist()
    slots = expert_of.argsort(stable=True)
    tokens = slots // max(routed.valid.shape[1], 1)
    split = torch.split_with_sizes
    parts = zip(split(slots, counts), split(tokens, counts), strict=True)
    found = zip(range(num_experts), counts, parts, strict=False)  # skips the slots without expert
    return [(expert, *part) for expert, count, part in found if count]
