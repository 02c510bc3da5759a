"""Mixture of experts: two products and an activation per expert, summed with routing weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op

# Activations between the two products of an expert, by name.


Function = Callable[..., Tensor]


@dataclass(frozen=True)
class ExpertActivation:
    """One activation.

    Attributes:
        function: maps the result of the first product, with *options* as keyword arguments.
        gated: whether its input has twice as many elements as its output.
        options: the names and defaults of its constants; a limit of None means no limit.
    """

    function: Function
    gated: bool = True
    options: Mapping[str, float | None] = field(default_factory=dict)


def _times_up(act: Callable[[Tensor], Tensor]) -> Function:
    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return act(gate) * up

    return apply


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _clamped(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * (gate * torch.sigmoid(gate * alpha))


def _swigluoai(x: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    return _clamped(x[..., 0::2], x[..., 1::2], alpha, beta, limit)


def _swigluoai_uninterleave(x: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _clamped(gate, up, alpha, beta, limit)


def _swiglustep(x: Tensor, limit: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _situ(x: Tensor, beta: float, limit: float | None) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    if limit is not None:
        up = limit * torch.tanh(up / limit)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype)


_OAI = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}

EXPERT_ACTIVATIONS: Mapping[str, ExpertActivation] = {
    "silu": ExpertActivation(_times_up(functional.silu)),
    "gelu": ExpertActivation(_times_up(functional.gelu)),
    "gelu_tanh": ExpertActivation(_times_up(_gelu_tanh)),
    "relu2": ExpertActivation(_times_up(_relu2)),
    "swigluoai": ExpertActivation(_swigluoai, options=_OAI),
    "swigluoai_uninterleave": ExpertActivation(_swigluoai_uninterleave, options=_OAI),
    "swiglustep": ExpertActivation(_swiglustep, options={"limit": 7.0}),
    "situ": ExpertActivation(_situ, options={"beta": 1.0, "limit": None}),
    "silu_no_mul": ExpertActivation(functional.silu, gated=False),
    "gelu_no_mul": ExpertActivation(functional.gelu, gated=False),
    "gelu_tanh_no_mul": ExpertActivation(_gelu_tanh, gated=False),
    "relu2_no_mul": ExpertActivation(_relu2, gated=False),
}


def expert_activation(name: str) -> ExpertActivation:
    """Return the activation called *name*; raise ValueError if it does not exist."""
    if name not in EXPERT_ACTIVATIONS:
        raise ValueError(
            f"unknown expert activation {name!r}; available: {', '.join(EXPERT_ACTIVATIONS)}."
        )
    return EXPERT_ACTIVATIONS[name]


def bound_activation(
    name: str, alpha: float | None, beta: float | None, limit: float | None
) -> Callable[[Tensor], Tensor]:
    """Return the activation called *name* as a function of one tensor.

    Args:
        name: the activation.
        alpha, beta, limit: its constants; None for the default.

    Raises:
        ValueError: the activation does not exist, or does not have a given constant.
    """
    activation = expert_activation(name)
    constants = {"alpha": alpha, "beta": beta, "limit": limit}
    chosen = {key: value for key, value in constants.items() if value is not None}
    for key in sorted(chosen.keys() - activation.options.keys()):
        others = [n for n, a in EXPERT_ACTIVATIONS.items() if key in a.options]
        raise ValueError(
            f"the activation {name!r} has no {key}, found {key}={chosen[key]}. Activations that "
            f"have it: {', '.join(others)}."
        )
    options = {**activation.options, **chosen}
    return lambda x: activation.function(x, **options)


# Mixture of experts: two products and an activation per expert, summed with routing weights.
#
# The native implementation runs every token through every expert and then selects the routed
# results: no shape depends on the routing, so that it compiles with dynamic token counts. The
# provider ``aten``, the default on CPU, computes the routed pairs only.


@register_op
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
    """``sum_k weight[t, k] * (w2[e] @ act(w13[e] @ x[t] + w13_bias[e]) + w2_bias[e])``.

    Here ``e`` is ``topk_ids[t, k]``, or ``expert_map[topk_ids[t, k]]``. The result of each expert
    is rounded to the dtype of ``x``; the weighted sum is in float32 (float64 stays), rounded once.

    Args:
        x: ``(T, hidden)``, floating point.
        w13: ``(E, 2 * intermediate, hidden)``, the dtype of ``x``: the rows of gate, then of up
            (interleaved for ``"swigluoai"``); ``(E, intermediate, hidden)`` for an activation
            without a gate.
        w2: ``(E, hidden, intermediate)``, the dtype of ``x``.
        topk_weights: ``(T, K)``, floating point.
        topk_ids: ``(T, K)``, integer. Ids out of range, such as -1, contribute nothing.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu2"`` of gate times up; the
            same with the suffix ``"_no_mul"`` for an activation without a gate; ``"swigluoai"``, or
            ``"swigluoai_uninterleave"`` for the rows of gate first: as in ``swigluoai_and_mul``,
            with ``beta`` for its 1; ``"swiglustep"``: ``min(silu(gate), limit) * clamp(up, -limit,
            limit)``; ``"situ"``: ``beta * tanh(gate / beta) * sigmoid(gate) * limit * tanh(up /
            limit)``.
        expert_map: ``(all experts,)``, integer: the index of each expert in the weights, or -1 for
            an expert on another rank, which contributes nothing. None for the identity.
        w13_bias: ``(E, rows of w13)`` or None.
        w2_bias: ``(E, hidden)`` or None.
        apply_router_weight_on_input: multiply ``x`` by the weight, rounded to its dtype, instead of
            the result; needs ``K == 1``.
        alpha, beta, limit: constants of the activation. Defaults: 1.702, 1 and 7 for
            ``"swigluoai"``, a limit of 7 for ``"swiglustep"``, 1 and no limit for ``"situ"``.

    Returns:
        ``(T, hidden)`` in the dtype of ``x``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit, the activation is unknown or does not have a given
            constant, or ``apply_router_weight_on_input`` is used with ``K != 1``.

    Source: Shazeer et al., arXiv:1701.06538; Mixtral, arXiv:2401.04088. Clamped: gpt-oss,
    arXiv:2508.10925.
    """
    act = bound_activation(activation, alpha, beta, limit)
    check_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    if len(w13) == 0:
        return x.new_zeros(x.shape)
    bias = None if w13_bias is None else w13_bias.flatten()
    hidden = functional.linear(routed.x, w13.flatten(0, 1), bias)
    hidden = act(torch.unflatten(hidden, -1, tuple(w13.shape[:2])))
    outputs = torch.einsum("tei,eoi->teo", hidden, w2)
    if w2_bias is not None:
        outputs = outputs + w2_bias
    index = routed.experts.long()[..., None].expand(-1, -1, w2.shape[1])
    return combine(outputs.gather(1, index), routed)


class Routed(NamedTuple):
    """Tokens and their routing.

    Attributes:
        x: the tokens, multiplied by their weights if those apply to the input.
        weights: ``(T, K)``: factors of the results, or None.
        experts: ``(T, K)``: indices into the weights; 0 without an expert.
        valid: ``(T, K)``: whether there is an expert.
    """

    x: Tensor
    weights: Tensor | None
    experts: Tensor
    valid: Tensor


def route(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_local: int,
    expert_map: Tensor | None,
    weight_on_input: bool,
) -> Routed:
    """Resolve expert ids to indices into the weights.

    Raises:
        ValueError: *weight_on_input* with more than one expert per token.
    """
    num_experts = num_local if expert_map is None else expert_map.shape[0]
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = torch.where(valid, topk_ids, 0)
    if expert_map is not None:
        experts = expert_map[experts.long()] if num_experts else experts
        valid = valid & (experts >= 0) & (experts < num_local)
        experts = torch.where(valid, experts, 0)
    if not weight_on_input:
        return Routed(x, topk_weights, experts, valid)
    if topk_ids.shape[1] != 1:
        raise ValueError(
            "fused_experts: apply_router_weight_on_input needs one expert per token; topk_ids has "
            f"{topk_ids.shape[1]}."
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    return Routed((x.to(wide) * topk_weights.to(wide)).to(x.dtype), None, experts, valid)


def combine(outputs: Tensor, routed: Routed) -> Tensor:
    """Return the weighted sum of the results ``(T, K, hidden)`` of each token's experts."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if routed.weights is not None:
        wide = wide * routed.weights.to(wide.dtype)[..., None]
    # Not a product with zero: the results of invalid pairs may be infinite.
    wide = torch.where(routed.valid[..., None], wide, 0.0)
    return wide.sum(dim=1).to(outputs.dtype)


def check_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> None:
    """Raise ValueError unless the shapes and dtypes fit together."""
    for name, tensor, ndim, shape in (
        ("x", x, 2, "(tokens, hidden)"),
        ("w13", w13, 3, "(experts, rows, hidden)"),
        ("w2", w2, 3, "(experts, hidden, intermediate)"),
        ("topk_ids", topk_ids, 2, "(tokens, experts per token)"),
    ):
        if tensor.ndim != ndim:
            raise ValueError(
                f"fused_experts: {name} must have shape {shape}; found {tuple(tensor.shape)}."
            )
    if topk_ids.is_floating_point() or topk_ids.is_complex() or topk_ids.dtype == torch.bool:
        raise ValueError(f"fused_experts: topk_ids must be integers; found {topk_ids.dtype}.")
    experts, hidden, size = w2.shape
    rows = 2 * size if expert_activation(activation).gated else size
    _check_shape("w13", w13, (experts, rows, hidden), f"w2 of {tuple(w2.shape)} and {activation!r}")
    _check_shape("x", x, (x.shape[0], hidden), f"w2 of {tuple(w2.shape)}")
    _check_shape("topk_ids", topk_ids, (x.shape[0], topk_ids.shape[1]), "x")
    _check_shape("topk_weights", topk_weights, tuple(topk_ids.shape), "topk_ids")
    if w13_bias is not None:
        _check_shape("w13_bias", w13_bias, (experts, rows), f"w13 of {tuple(w13.shape)}")
    if w2_bias is not None:
        _check_shape("w2_bias", w2_bias, (experts, hidden), f"w2 of {tuple(w2.shape)}")
    weights = {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias}
    for name, weight in weights.items():
        if weight is not None and weight.dtype != x.dtype:
            raise ValueError(
                f"fused_experts: {name} must have the dtype of x, {x.dtype}; it is {weight.dtype}."
            )


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], because: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"fused_experts: {name} must have shape {expected} to fit {because}; found "
            f"{tuple(tensor.shape)}."
        )


@fused_experts.register_input_generator
def _inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    intermediate_size: int = 32,
    num_experts: int = 8,
    topk: int = 2,
    unrouted: bool = False,
    has_map: bool = False,
    has_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Make experts, tokens and their routing.

    With *unrouted*, the first token and some others have no expert. With *has_map*, every second
    expert is on another rank.
    """
    x = torch.randn(num_tokens, hidden_size, device=device)
    w13 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device)
    w2 = torch.randn(num_experts, hidden_size, intermediate_size, device=device)
    scores = torch.rand(num_tokens, num_experts, device=device)
    weights, ids = scores.topk(topk)
    w13, w2 = w13 / hidden_size**0.5, w2 / intermediate_size**0.5
    weights = weights / weights.sum(-1, keepdim=True)
    expert_map = None
    biases: list[Tensor | None] = [None, None]
    if has_map:
        experts = torch.arange(2 * num_experts, device=device)
        expert_map = torch.where(experts % 2 == 0, experts.flip(0) // 2, -1).to(torch.int32)
        ids = 2 * ids + torch.randint(2, ids.shape, device=device)
    if unrouted:
        invalid = torch.tensor([-1, 2 * num_experts], device=device)
        ids = torch.where(torch.rand(ids.shape, device=device) < 0.3, invalid[ids % 2], ids)
        ids[:1] = -1
    if has_bias:
        biases = [torch.randn(w.shape[:2], device=device).to(dtype) for w in (w13, w2)]
    values = x.to(dtype), w13.to(dtype), w2.to(dtype), weights, ids.to(torch.int32)
    return *values, "silu", expert_map, *biases, False, None, None, None


# Sums in a different order with three roundings to the dtype: the error grows with the number of
# terms.
fused_experts.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
fused_experts.override_tolerance(torch.bfloat16, atol=3e-2, rtol=1.6e-2)
fused_experts.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)
