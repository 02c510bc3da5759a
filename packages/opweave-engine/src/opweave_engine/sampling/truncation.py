"""Temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opweave_engine.sampling.ranking import best_tokens, ranking_keys
from opweave_engine.sampling.sampling_params import SamplingParams

# The number of tokens ranked at first. Truncation nearly always leaves fewer, and sorting the whole
# vocabulary takes longer than all other work together.
_RANKED = 1024


class Distribution(NamedTuple):
    """The distribution that a row samples from.

    Attributes:
        weights: ``(rows, tokens)`` float64, proportional to the probabilities.
        tokens: int64, of the same shape.
    """

    weights: Tensor
    tokens: Tensor


def plain_weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights of all tokens, for rows without ``top_k``, ``top_p`` and ``min_p``.

    Args:
        logits: ``(rows, vocabulary)``, finite maximum in each row.
        params: one for each row, none greedy.

    Returns:
        ``(rows, vocabulary)`` float64, in the order of the vocabulary; they add up to 1.
    """
    return torch.softmax(_scores(logits, params), dim=-1)


def cut_distributions(
    logits: Tensor, params: Sequence[SamplingParams]
) -> list[tuple[list[int], Distribution]]:
    """Return the truncated distributions, in groups of rows.

    The temperature divides the logits. ``top_k`` keeps the k most likely tokens. ``top_p`` keeps
    the smallest number of the most likely tokens whose probabilities, renormalized after ``top_k``,
    add up to at least p. ``min_p`` keeps tokens with at least ``min_p`` times the highest
    probability. The most likely token is always kept.

    Args:
        logits: ``(rows, vocabulary)``, finite maximum in each row.
        params: one for each row, none greedy.

    Returns:
        Groups: the indices of their rows, and the distributions, the most likely token first.
    """
    scores, keys = _scores(logits, params), ranking_keys(logits)
    vocabulary = logits.shape[-1]
    cuts = _Cuts.of(params, logits)
    weights, tokens, is_enough = cuts.apply(scores, best_tokens(keys, min(vocabulary, _RANKED)))
    few = is_enough.nonzero().flatten()
    groups = [(few, Distribution(weights[few], tokens[few]))]
    many = (~is_enough).nonzero().flatten()
    if len(many):
        # Whether a row is ranked completely depends on that row alone, so results do not depend on
        # the batch.
        rest = cuts.rows(many)
        weights, tokens, _ = rest.apply(scores[many], best_tokens(keys[many], vocabulary))
        groups.append((many, Distribution(weights, tokens)))
    return [(rows.tolist(), drawn) for rows, drawn in groups if len(rows)]


class _Cuts(NamedTuple):
    """The parameters of some rows, each ``(rows, 1)``; *log_min_p* is ``log(min_p)``."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], like: Tensor) -> _Cuts:
        vocabulary = like.shape[-1]
        top_k = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
        top_p = [p.top_p if p.top_p < 1 else torch.inf for p in params]
        return cls(
            _column(top_k, like),
            _column(top_p, like),
            _column([p.min_p for p in params], like).log(),
        )

    def rows(self, rows: Tensor) -> _Cuts:
        return _Cuts(*(cut[rows] for cut in self))

    def apply(self, scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, tokens, and which rows need no more tokens than given."""
        count, vocabulary = tokens.shape[-1], scores.shape[-1]
        ranked = scores.gather(-1, tokens)
        rank = torch.arange(count, device=scores.device)
        weights = ranked.exp().masked_fill(rank >= self.top_k, 0.0)
        whole = scores.exp().sum(dim=-1, keepdim=True)
        total = torch.where(self.top_k < vocabulary, weights.sum(dim=-1, keepdim=True), whole)
        weights = weights / total
        reached = weights.cumsum(dim=-1)
        is_cut = (reached - weights >= self.top_p) | (ranked < self.log_min_p)
        is_over = (reached[:, -1:] >= self.top_p) | (ranked[:, -1:] < self.log_min_p)
        is_enough = (self.top_k <= count) | ((self.top_k == vocabulary) & is_over)
        return weights.masked_fill(is_cut & (rank > 0), 0.0), tokens, is_enough.flatten()


def _scores(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divide by the temperatures, in float64."""
    exact = logits.double()
    # The maximum becomes 0 before the division, so a small temperature cannot overflow.
    best = exact.amax(dim=-1, keepdim=True)
    return (exact - best) / _column([p.temperature for p in params], logits)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)
