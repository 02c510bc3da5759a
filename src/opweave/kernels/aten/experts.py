"""Mixture of experts with two matrix products per expert with tokens.

The number of tokens per expert is read on the host, so this cannot be traced: compiled code calls
it as an opaque op, and calls that need gradients use native.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.expert_activation import bound_activation
from opweave.ir.ops.fused_experts import Routed, check_experts, combine, route


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
    return combine(of_each_expert(routed, act, w13, w2, w13_bias, w2_bias), routed)


def of_each_expert(
    routed: Routed,
    act: Callable[[Tensor], Tensor],
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Tensor:
    """Return the outputs of the experts: ``(T, K, hidden)``, 0 where a token has no expert."""
    outputs = routed.x.new_zeros(routed.valid.numel(), routed.x.shape[1])
    for expert, slots, tokens in _groups(routed, len(w13)):
        bias = None if w13_bias is None else w13_bias[expert]
        hidden = act(ops.linear(routed.x[tokens], w13[expert], bias))
        bias = None if w2_bias is None else w2_bias[expert]
        outputs[slots] = ops.linear(hidden, w2[expert], bias)
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
