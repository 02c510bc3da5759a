"""Mixture of experts, with batch-invariant ops for each expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opweave.ir import IrOp, ops, require
from opweave.ir.ops.expert_activation import bound_activation
from opweave.ir.ops.fused_experts import Routed, check_experts, combine, route
from opweave.ir.ops.fused_experts_quant import check_experts_quant, low_bit_product
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.aten.experts import dense_products, of_each_expert
from opweave.kernels.batch_invariant.opaque import opaque
from opweave.kernels.batch_invariant.rows import of_rows

_TRAITS = {BATCH_INVARIANT}


@ops.fused_experts.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.fused_experts)
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
    check_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    act = bound_activation(activation, alpha, beta, limit)
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    # Inner ops must be batch-invariant even if the caller does not require it, so that the result
    # is the same in both cases.
    with require(BATCH_INVARIANT):
        each = ops.silu_and_mul if activation == "silu" else partial(_each, act)
        first, second = dense_products(w13, w2, w13_bias, w2_bias)
        outputs = of_each_expert(routed, len(w13), first, each, second)
        return _combined(outputs, routed)


@ops.fused_experts_quant.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.fused_experts_quant)
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
    check_experts_quant(
        x, w13, w13_scale, w13_offset, w2, w2_scale, w2_offset, topk_weights, topk_ids,
        w13_format, w2_format, activation,
    )  # fmt: skip
    act = bound_activation(activation, alpha, beta, limit)
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    with require(BATCH_INVARIANT):
        each = ops.silu_and_mul if activation == "silu" else partial(_each, act)
        first = low_bit_product(w13, w13_scale, w13_offset, w13_format)
        second = low_bit_product(w2, w2_scale, w2_offset, w2_format)
        outputs = of_each_expert(routed, len(w13), first, each, second)
        return _combined(outputs, routed)


def _each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return _joined(lambda row: (function(row),), x)[0]


def _combined(outputs: Tensor, routed: Routed) -> Tensor:
    def row(outputs: Tensor, valid: Tensor, weights: Tensor | None = None) -> tuple[Tensor]:
        return (combine(outputs, routed._replace(valid=valid, weights=weights)),)

    weights = () if routed.weights is None else (routed.weights,)
    return _joined(row, outputs, routed.valid, *weights)[0]


@ops.moe_sum.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.moe_sum)
def moe_sum(x: Tensor) -> Tensor:
    return _each(ops.moe_sum.native, x)


def _topk(op_name: str) -> None:
    op: IrOp = getattr(ops, op_name)

    @op.register_impl("batch_invariant", traits=_TRAITS)
    @opaque(op)
    def topk(
        gating_output: Tensor,
        topk: int,
        renormalize: bool = False,
        bias: Tensor | None = None,
        routed_scaling_factor: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        rest = (topk, renormalize, bias, routed_scaling_factor)
        return _routed(lambda row: op.native(row, *rest), gating_output)


for _name in ("topk_softmax", "topk_sigmoid", "topk_sqrtsoftplus"):
    _topk(_name)


@ops.grouped_topk.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.grouped_topk)
def grouped_topk(
    gating_output: Tensor,
    topk: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool = False,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    groups = (num_expert_group, topk_group)
    rest = (renormalize, scoring_func, routed_scaling_factor, e_score_correction_bias)
    return _routed(lambda row: ops.grouped_topk.native(row, topk, *groups, *rest), gating_output)


def _routed(
    route: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Call *route* with each row of *logits*, or once for an invalid shape, so that it raises."""
    weights, ids = _joined(route, logits) if logits.ndim == 2 else route(logits)
    return weights, ids


def _joined(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call *function* with each row of *tensors*, and concatenate the results."""
    if tensors[0].ndim == 0 or tensors[0].shape[0] < 2:
        return function(*tensors)  # raises for an invalid shape
    results = of_rows(function, *tensors)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
