"""Chooses the next token of each sequence from the model's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opweave.engine.errors import NonFiniteLogitsError
from opweave.engine.sampling_params import SamplingParams


class SamplingRequest(NamedTuple):
    """How to sample one row: its parameters, and its own source of randomness."""

    params: SamplingParams
    generator: torch.Generator


def sample(logits: Tensor, requests: Sequence[SamplingRequest]) -> list[int]:
    """Return a token for each row of *logits*.

    A row takes one number from its own generator, so its token depends on no other row.

    Args:
        logits: ``(rows, vocabulary)``, floating point.
        requests: one for each row.

    Raises:
        NonFiniteLogitsError: scores are NaN, or a row has no finite maximum.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    if not bool(logits.gather(-1, best).isfinite().all()):  # a NaN counts as the maximum
        raise NonFiniteLogitsError(
            "The model's scores are not finite. Try dtype='float32'; if it persists, a weight or a "
            "kernel is wrong; opweave generate --explain shows which kernels ran."
        )
    tokens: list[int] = best.flatten().tolist()
    # Ranking a vocabulary is slow, and the order decides which token a random number means: a
    # row is ranked if it needs it, whatever the others need.
    for draw, drawn_so in ((_draw_ranked, _is_cut), (_draw_plain, _is_plain)):
        rows = [row for row, request in enumerate(requests) if drawn_so(request.params)]
        if rows:
            drawn = draw(logits[rows], [requests[row] for row in rows])
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
    return tokens


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return the probabilities that rows are sampled with, most likely first, and their tokens.

    Temperature applies first, then ``top_k``, then ``top_p`` on what is left. Of equal scores, the
    lower token comes first. The probabilities are not normalised: what was cut is zero.

    Args:
        logits: ``(rows, vocabulary)``, finite maximum in each row.
        params: one for each row, none greedy.

    Returns:
        ``(rows, vocabulary)`` float64 and int64.
    """
    ranked, tokens = logits.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[-1]
    top_k = _column([p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params], logits)
    top_p = _column([p.top_p if p.top_p < 1 else torch.inf for p in params], logits)
    rank = torch.arange(vocabulary, device=logits.device)
    scores = _scores(ranked, params).masked_fill(rank >= top_k, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    before = weights.cumsum(dim=-1) - weights
    return weights.masked_fill((before >= top_p) & (rank > 0), 0.0), tokens


def _is_cut(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1)


def _is_plain(params: SamplingParams) -> bool:
    return not params.is_greedy and not _is_cut(params)


def _draw_ranked(logits: Tensor, requests: Sequence[SamplingRequest]) -> list[int]:
    weights, tokens = probabilities(logits, [request.params for request in requests])
    return _listed(tokens.gather(-1, _indices(weights, requests)))


def _draw_plain(logits: Tensor, requests: Sequence[SamplingRequest]) -> list[int]:
    scores = _scores(logits, [request.params for request in requests])
    return _listed(_indices(torch.softmax(scores, dim=-1), requests))


def _scores(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divide by the temperatures, in float64."""
    exact = logits.double()
    # The best score becomes 0 before the division, so that no temperature overflows it.
    best = exact.amax(dim=-1, keepdim=True)
    return (exact - best) / _column([p.temperature for p in params], logits)


def _indices(weights: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
    """Draw an index from each row with probabilities proportional to its weights."""
    uniform = _column(
        [torch.rand((), generator=r.generator, dtype=torch.float64).item() for r in requests],
        weights,
    )
    cumulative = weights.cumsum(dim=-1)
    # uniform is below 1, so the product is below the total, even rounded: a token with a weight.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _listed(indices: Tensor) -> list[int]:
    values: list[int] = indices.flatten().tolist()
    return values
