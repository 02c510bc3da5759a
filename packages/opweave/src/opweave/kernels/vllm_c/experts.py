"""Mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.ops.expert_activation import bound_activation
from opweave.ir.ops.fused_experts import check_experts
from opweave.ir.traits import ROUNDS_LESS
from opweave.kernels.vllm_c import library

_UNQUANTIZED = 0


def _has_whole_blocks(x: Tensor, w13: Tensor, w2: Tensor) -> bool:
    return w13.shape[0] > 0 and x.shape[1] % 32 == 0 and w2.shape[-1] % 32 == 0


@library.implements(
    ops.fused_experts,
    rules.cpu("x", "w13", "w2", "topk_weights", "topk_ids")
    & rules.dtype("x", torch.bfloat16)
    & rules.same_dtype("x", "w13", "w2")
    & rules.contiguous("x", "w13", "w2")
    & rules.one_of("activation", "silu")
    & rules.is_none("expert_map")
    & rules.is_none("w13_bias")
    & rules.is_none("w2_bias")
    & rules.one_of("apply_router_weight_on_input", False)
    & rules.custom(_has_whole_blocks, "the sizes must be multiples of 32"),
    traits={ROUNDS_LESS},
)
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
    """Return the weighted sum of the experts' outputs; each call packs the weights."""
    bound_activation(activation, alpha, beta, limit)
    check_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    is_valid = (topk_ids >= 0) & (topk_ids < w13.shape[0])
    # The kernel has no tokens without an expert: those get the first one, with the weight 0.
    weights = torch.where(is_valid, topk_weights, 0).float().contiguous()
    experts = torch.where(is_valid, topk_ids, 0).int().contiguous()
    out = torch.empty_like(x)
    if x.shape[0] == 0:
        return out
    library.ops().fused_experts_cpu(
        out, x, w13, w2, weights, experts, _UNQUANTIZED, None, None, None, None, None, None,
        None, None, None, None, False,
    )  # fmt: skip
    return out
