"""Log-probabilities of tokens, from the model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opweave_engine.request.outputs import Logprob
from opweave_engine.sampling.ranking import best_tokens, ranking_keys
from opweave_engine.tokenization.tokenizer import Tokenizer


class TokenLogprob(NamedTuple):
    """The log-probability of one token.

    Attributes:
        token_id: the token.
        logprob: its natural logarithm.
        rank: 1 for the most likely token of the vocabulary.
    """

    token_id: int
    logprob: float
    rank: int


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """Return for each row the sampled token, then the most likely tokens, best first.

    The sampled token is not repeated.

    Args:
        logits: ``(rows, vocabulary)``, the model's logits.
        tokens: the sampled token of each row.
        counts: the number of most likely tokens of each row.
    """
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    keys = ranking_keys(logits)
    best = best_tokens(keys, min(max(counts), logits.shape[-1]))
    ranks = (keys > keys.gather(-1, chosen)).sum(dim=-1) + 1
    ids = torch.cat([chosen, best], dim=-1)
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids)
    rows = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), counts, strict=True)
    return [_row(*row) for row in rows]


def named(found: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Mapping[int, Logprob]:
    """Return a row of :func:`token_logprobs` with the texts of the tokens."""
    return {
        each.token_id: Logprob(each.logprob, each.rank, tokenizer.piece(each.token_id))
        for each in found
    }


def _row(ids: list[int], logprobs: list[float], rank: int, count: int) -> tuple[TokenLogprob, ...]:
    first = TokenLogprob(ids[0], logprobs[0], rank)
    best = zip(ids[1 : count + 1], logprobs[1 : count + 1], range(1, count + 1), strict=False)
    return first, *(TokenLogprob(*each) for each in best if each[0] != first.token_id)
