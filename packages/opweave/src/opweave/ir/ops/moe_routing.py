"""Mixture of experts: routing of tokens to experts, and the sum over experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.rules import ROWWISE

# Routing of tokens to experts.
#
# Non-finite scores count as zero, and ties go to the lower expert id. Every row thus has
# ``topk`` different experts and finite weights, regardless of the logits.


_SMALLEST_SUM = 1e-20  # avoids 0 / 0, and vanishes in any other sum


@register_op(activations=["gating_output"], native_traits={ROWWISE})
def topk_softmax(
    gating_output: Tensor,
    topk: int,
    renormalize: bool = False,
    bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The *topk* experts with the highest ``softmax(logits)``, and these probabilities.

    Args:
        gating_output: ``(T, E)``, the logits of ``E`` experts for each token, floating point.
        topk: number of experts per token.
        renormalize: divide the weights of a token by their sum: a softmax over the chosen logits.
        bias: ``(E,)`` or None; added to the scores for the choice, but not to the weights.
        routed_scaling_factor: final factor of the weights.

    Returns:
        The weights ``(T, topk)``, float32 (float64 for float64 logits), and the experts ``(T,
        topk)``, int32, in descending order of scores.

    Raises:
        ValueError: there are fewer than ``topk`` experts, or a shape does not fit.

    Source: Shazeer et al., arXiv:1701.06538; renormalized: Mixtral, arXiv:2401.04088.
    """
    scores = torch.softmax(_wide(gating_output), dim=-1)
    return _plain(scores, topk, renormalize, bias, routed_scaling_factor, "topk_softmax")


@register_op(activations=["gating_output"], native_traits={ROWWISE})
def topk_sigmoid(
    gating_output: Tensor,
    topk: int,
    renormalize: bool = False,
    bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The *topk* experts with the highest ``sigmoid(logits)``, and these scores.

    Arguments, results and errors are those of :func:`topk_softmax`.

    Source: DeepSeek-V3, arXiv:2412.19437, without groups; Llama 4, with ``topk=1``.
    """
    scores = torch.sigmoid(_wide(gating_output))
    return _plain(scores, topk, renormalize, bias, routed_scaling_factor, "topk_sigmoid")


@register_op(activations=["gating_output"], native_traits={ROWWISE})
def topk_sqrtsoftplus(
    gating_output: Tensor,
    topk: int,
    renormalize: bool = False,
    bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The *topk* experts with the highest ``sqrt(softplus(logits))``, and these scores.

    Arguments, results and errors are those of :func:`topk_softmax`.

    Source: DeepSeek-V4.
    """
    scores = torch.sqrt(functional.softplus(_wide(gating_output)))
    return _plain(scores, topk, renormalize, bias, routed_scaling_factor, "topk_sqrtsoftplus")


@register_op(activations=["gating_output"], native_traits={ROWWISE})
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
    """The *topk* best experts out of the *topk_group* best groups of consecutive experts.

    The score of a group is that of its best expert, or with a bias the sum of its two best.

    Args:
        gating_output: ``(T, E)``, the logits of ``E`` experts for each token, floating point.
        topk: number of experts per token.
        num_expert_group: number of groups, all of the same size.
        topk_group: number of groups to choose experts from.
        renormalize: divide the weights of a token by their sum.
        scoring_func: maps logits to scores: ``"softmax"`` or ``"sigmoid"``.
        routed_scaling_factor: final factor of the weights.
        e_score_correction_bias: ``(E,)`` or None; added to the scores for the choice, but not to
            the weights.

    Returns:
        As :func:`topk_softmax`.

    Raises:
        ValueError: ``scoring_func`` is unknown, the number of groups does not divide the number of
            experts, or there are too few groups or experts.

    Source: DeepSeek-V2, arXiv:2405.04434; with a bias DeepSeek-V3, arXiv:2412.19437.
    """
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(
            f"grouped_topk: scoring_func must be 'softmax' or 'sigmoid', not {scoring_func!r}."
        )
    logits = _wide(gating_output)
    raw = torch.softmax(logits, dim=-1) if scoring_func == "softmax" else torch.sigmoid(logits)
    scores, choice = _choice(raw, topk, e_score_correction_bias, "grouped_topk")
    size = _group_size(
        scores.shape[1], topk, num_expert_group, topk_group, e_score_correction_bias is not None
    )
    groups = torch.unflatten(choice, -1, (num_expert_group, size))
    best = 1 if e_score_correction_bias is None else 2
    group_scores = groups.topk(best, dim=-1).values.sum(dim=-1)
    is_chosen = torch.zeros_like(group_scores, dtype=torch.bool)
    is_chosen = is_chosen.scatter(1, _highest(group_scores, topk_group), True)
    masked = groups.masked_fill(~is_chosen[..., None], float("-inf")).flatten(1)
    return _weights(scores, masked, topk, renormalize, routed_scaling_factor)


def _wide(logits: Tensor) -> Tensor:
    # Sorting keeps the memory order of dimensions, and results must be contiguous.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()


def _plain(
    raw: Tensor, topk: int, renormalize: bool, bias: Tensor | None, scale: float, name: str
) -> tuple[Tensor, Tensor]:
    scores, choice = _choice(raw, topk, bias, name)
    return _weights(scores, choice, topk, renormalize, scale)


def _choice(raw: Tensor, topk: int, bias: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """Return the scores for the weights, and those for the choice."""
    if raw.ndim != 2:
        raise ValueError(
            f"{name}: gating_output must have shape (tokens, experts); found {tuple(raw.shape)}."
        )
    if not 1 <= topk <= raw.shape[1]:
        raise ValueError(
            f"{name}: topk={topk} must be from 1 to the number of experts, {raw.shape[1]}."
        )
    if bias is not None and bias.shape != raw.shape[1:]:
        raise ValueError(
            f"{name}: the bias must have one element for each of the {raw.shape[1]} experts; "
            f"found shape {tuple(bias.shape)}."
        )
    scores = torch.where(raw.isfinite(), raw, 0.0)
    return scores, scores if bias is None else scores + bias.to(scores.dtype)


def _highest(choice: Tensor, count: int) -> Tensor:
    """Return the indices of the highest of each row; ties go to the first, unlike torch.topk."""
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :count]


def _weights(
    scores: Tensor, choice: Tensor, topk: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    ids = _highest(choice, topk)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    return weights * scale, ids.to(torch.int32)


def _group_size(experts: int, topk: int, groups: int, topk_group: int, has_bias: bool) -> int:
    if groups < 1 or experts % groups:
        raise ValueError(
            f"grouped_topk: num_expert_group={groups} does not divide the {experts} experts."
        )
    size = experts // groups
    if not 1 <= topk_group <= groups:
        raise ValueError(
            f"grouped_topk: topk_group={topk_group} must be from 1 to num_expert_group={groups}."
        )
    if topk > topk_group * size:
        raise ValueError(
            f"grouped_topk: topk={topk} experts cannot come from topk_group={topk_group} groups of "
            f"{size}."
        )
    if has_bias and size < 2:
        raise ValueError(
            "grouped_topk: with a bias, a group needs at least two experts, but "
            f"num_expert_group={groups} gives one of the {experts} to each. Use fewer groups, or "
            "topk_sigmoid."
        )
    return size


@topk_softmax.register_input_generator
@topk_sigmoid.register_input_generator
@topk_sqrtsoftplus.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_experts: int = 16,
    topk: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, int, bool, Tensor, float]:
    logits = torch.randn(num_tokens, num_experts, device=device).to(dtype)
    return logits, topk, True, 0.1 * torch.randn(num_experts, device=device), 1.5


@grouped_topk.register_input_generator
def _grouped_inputs(
    num_tokens: int = 8,
    num_experts: int = 16,
    topk: int = 4,
    num_expert_group: int = 4,
    topk_group: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, int, int, int, bool, str, float, Tensor]:
    logits, topk, renormalize, bias, scale = _inputs(num_tokens, num_experts, topk, dtype, device)
    return logits, topk, num_expert_group, topk_group, renormalize, "sigmoid", scale, bias


# Sum over the experts of a token.


@register_op(native_traits={ROWWISE})
def moe_sum(x: Tensor) -> Tensor:
    """Sum over the middle dimension, in float32 (float64 stays), rounded once.

    Args:
        x: ``(T, K, hidden)``, floating point: the weighted results of each token's experts.

    Returns:
        ``(T, hidden)`` in the dtype of ``x``.

    Raises:
        ValueError: ``x`` does not have three dimensions.
    """
    if x.ndim != 3:
        raise ValueError(
            f"moe_sum: x must have shape (tokens, experts per token, hidden); found "
            f"{tuple(x.shape)}."
        )
    return x.to(torch.promote_types(x.dtype, torch.float32)).sum(dim=1).to(x.dtype)


@moe_sum.register_input_generator
def _moe_sum_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    topk: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor]:
    return (torch.randn(num_tokens, topk, hidden_size, device=device).to(dtype),)
