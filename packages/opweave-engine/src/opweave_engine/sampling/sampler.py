"""Samples the next token of each sequence from the model's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opweave_engine.errors import NonFiniteLogitsError, NoTokenLeftError
from opweave_engine.sampling.logits_processors import adjusted
from opweave_engine.sampling.logprobs import token_logprobs
from opweave_engine.sampling.randomness import uniform
from opweave_engine.sampling.sampling_request import Sampled, SamplingRequest
from opweave_engine.sampling.truncation import cut_distributions, plain_weights

__all__ = ["Sampled", "Sampler", "SamplingRequest", "non_finite", "sample"]


class Sampler:
    """Samples the next token of each row. A platform may name another class.

    Penalties, bias and forbidden tokens change the logits first (see
    :func:`~opweave_engine.sampling.logits_processors.adjusted`). Then the temperature divides them,
    then ``top_k``, ``top_p`` and ``min_p`` truncate: the order of transformers. Log-probabilities
    are of the model's raw logits.
    """

    def __call__(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> list[Sampled]:
        """Return the token sampled for each row of *logits*, independently of other rows.

        Args:
            logits: ``(rows, vocabulary)``, floating point; not changed.
            requests: one for each row.

        Raises:
            NonFiniteLogitsError: logits are NaN, or a row has no finite maximum.
            NoTokenLeftError: a request rules out every token.
        """
        sampled = [Sampled(token) for token in sample(logits, requests)]
        asked = [row for row, r in enumerate(requests) if r.params.logprobs is not None]
        if asked:
            tokens = [sampled[row].token_id for row in asked]
            counts = [requests[row].params.logprobs or 0 for row in asked]
            for row, found in zip(
                asked, token_logprobs(logits[asked], tokens, counts), strict=True
            ):
                sampled[row] = sampled[row]._replace(logprobs=found)
        return sampled


def sample(logits: Tensor, requests: Sequence[SamplingRequest]) -> list[int]:
    """Return a token for each row of *logits*; arguments and errors are those of a sampler."""
    scores = adjusted(logits, requests)
    best = scores.float().argmax(dim=-1, keepdim=True)  # on the CPU, faster than in 16 bits
    _check_finite(scores.gather(-1, best).flatten().tolist(), logits)  # NaN is the maximum
    tokens: list[int] = best.flatten().tolist()
    drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if drawn:
        for row, token in _draw(scores, requests, drawn):
            tokens[row] = token
    return tokens


def non_finite(kind: str, rows: Sequence[int]) -> NonFiniteLogitsError:
    """Return the error for logits of some rows that are *kind*: NaN or infinite."""
    return NonFiniteLogitsError(
        f"The model returned {kind} logits, and scores that are not finite choose no token. "
        "Try dtype='float32'; if that does not help, a weight or a kernel is wrong: opweave "
        "generate --explain shows which kernels ran.",
        rows=rows,
    )


def _check_finite(best: Sequence[float], logits: Tensor) -> None:
    rows = [row for row, score in enumerate(best) if not math.isfinite(score)]
    if not rows:
        return
    given = logits[rows].float()
    is_bad = given.isnan().any(-1) | ~given.amax(-1).isfinite()
    if broken := [row for row, bad in zip(rows, is_bad.tolist(), strict=True) if bad]:
        kind = "NaN" if given.isnan().any() else "infinite"
        raise non_finite(kind, broken)
    raise NoTokenLeftError(
        "No token is left to choose: allowed_token_ids, bad_words, min_tokens and the form of the "
        "answer rule out every token to which the model gives a finite score.",
        rows=rows,
    )


def _draw(
    scores: Tensor, requests: Sequence[SamplingRequest], rows: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the tokens of the rows that are drawn, each with its row."""
    # Ranking a vocabulary is slow, and the order decides which token a random number means: a
    # row is ranked if it needs it, regardless of the others.
    plain = [row for row in rows if not requests[row].params.cuts]
    cut = [row for row in rows if requests[row].params.cuts]
    found: list[tuple[int, int]] = []
    if plain:
        weights = plain_weights(scores[plain], [requests[row].params for row in plain])
        tokens = _indices(weights, [requests[row] for row in plain]).flatten().tolist()
        found += zip(plain, tokens, strict=True)
    if cut:
        groups = cut_distributions(scores[cut], [requests[row].params for row in cut])
        for group, drawn in groups:
            of_group = [cut[number] for number in group]
            indices = _indices(drawn.weights, [requests[row] for row in of_group])
            tokens = drawn.tokens.gather(-1, indices).flatten().tolist()
            found += zip(of_group, tokens, strict=True)
    return found


def _indices(weights: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
    """Draw an index from each row with probabilities proportional to its weights."""
    numbers = [uniform(request.seed, request.place) for request in requests]
    drawn = torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(-1)
    cumulative = weights.cumsum(dim=-1)
    # A number is below 1, so the product is below the total, even rounded: a token with a weight.
    return torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)
