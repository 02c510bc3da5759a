"""Samples the next token of each sequence from the model's logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from opweave_engine.errors import NonFiniteLogitsError, NoTokenLeftError
from opweave_engine.outputs import Logprob
from opweave_engine.sampling.history import History
from opweave_engine.sampling.params import SamplingParams
from opweave_engine.tokenizer import Tokenizer

# Stateless random numbers: hashes of a seed and a position.


def uniform(seed: int, place: int) -> float:
    """Return the random number for *seed* and *place*, uniformly distributed over [0, 1).

    Equal arguments give the same number in any process.

    Args:
        seed: from 0 to 2**64 - 1.
        place: from 0 to 2**64 - 1.
    """
    return (_hashed(seed, place) >> 11) * 2.0**-53


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of one of several answers; the first one uses *seed*."""
    return seed if index == 0 else _hashed(seed, index, b"answer") >> 1


def _hashed(seed: int, number: int, purpose: bytes = b"") -> int:
    content = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(blake2b(content, digest_size=8, person=purpose).digest(), "little")


# The order of tokens by score: one order for sampling and for log-probabilities.


_LOW_BITS = 0xFFFFFFFF


def ranking_keys(logits: Tensor) -> Tensor:
    """Return an integer key for each token: larger for a higher score, and on ties for a lower id.

    All keys of a row differ, so the best tokens do not depend on the sorting algorithm.

    Args:
        logits: ``(rows, vocabulary)``, finite or -inf; compared in float32.

    Returns:
        int64, of the same shape.
    """
    # Adding zero makes -0.0 and 0.0 one. The bits of a float rise with it if it is positive, and
    # fall if it is negative (IEEE 754).
    bits = (logits.float() + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return (rising << 32) | (_LOW_BITS - tokens)


def best_tokens(keys: Tensor, count: int) -> Tensor:
    """Return the *count* best tokens of each row, the best first: ``(rows, count)`` int64."""
    if count < keys.shape[-1]:
        best = keys.topk(count, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values
    return _LOW_BITS - (best & _LOW_BITS)


# Log-probabilities of tokens, from the model's logits.


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


def named(row: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Mapping[int, Logprob]:
    """Return a row of :func:`token_logprobs` with the texts of the tokens."""
    return {token: Logprob(logprob, rank, tokenizer.piece(token)) for token, logprob, rank in row}


def _row(ids: list[int], logprobs: list[float], rank: int, count: int) -> tuple[TokenLogprob, ...]:
    first = TokenLogprob(ids[0], logprobs[0], rank)
    best = map(TokenLogprob, ids[1 : count + 1], logprobs[1 : count + 1], range(1, count + 1))
    return first, *(token for token in best if token.token_id != first.token_id)


# Input and output of the sampler for one row: plain data that any process can read.


class SamplingRequest(NamedTuple):
    """How to sample one token.

    Attributes:
        params: the request's sampling parameters.
        seed: the output's seed.
        place: number of tokens generated so far; seed and place determine the random number.
        forbidden: token ids that must not be sampled here.
        history: the tokens that penalties apply to; None: no penalty is set.
        allowed: bit mask of the token ids that may be sampled here, the lowest bit of a byte first;
            None: all.
    """

    params: SamplingParams
    seed: int
    place: int = 0
    forbidden: tuple[int, ...] = ()
    history: History | None = None
    allowed: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """Whether only the token with the largest logit is wanted."""
        params = self.params
        scores = params.logprobs is not None or params.prompt_logprobs is not None
        return params.is_greedy and not scores and not _is_adjusted(self)


class Sampled(NamedTuple):
    """The token sampled for one row.

    Attributes:
        token_id: the token.
        logprobs: log-probabilities of the token and of the most likely tokens, if requested.
        prompt_logprobs: the same for the prompt tokens that the step computed.
    """

    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


# Logits processors: penalties, bias, and tokens that must not be sampled.


_MAX_LOGIT = torch.finfo(torch.float32).max


def adjusted(logits: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
    """Return the logits after all logits processors, in this order.

    1. The repetition penalty divides positive logits of tokens in the prompt or the output, and
       multiplies negative ones (Keskar et al. 2019, arXiv:1909.05858, eq. 4).
    2. Presence and frequency penalties are subtracted, as OpenAI's API defines them.
    3. The bias is added.
    4. Tokens that are forbidden at this position, or that ``allowed_token_ids`` or a grammar
       exclude, get the logit -inf.

    Args:
        logits: ``(rows, vocabulary)``, floating point; not changed.
        requests: one for each row.

    Returns:
        *logits* themselves if no request changes them; else new float32 logits.
    """
    if not any(map(_is_adjusted, requests)):
        return logits
    scores = logits.to(torch.float32, copy=True)
    rows, tokens, numbers = _columns(requests, _repetition_penalties, scores.device)
    old = scores[rows, tokens].double()
    _put(scores, rows, tokens, torch.where(old > 0, old / numbers, old * numbers))
    for values in (_penalties, _biases):
        rows, tokens, numbers = _columns(requests, values, scores.device)
        _put(scores, rows, tokens, scores[rows, tokens].double() + numbers)
    rows, tokens, _ = _columns(requests, _forbidden, scores.device)
    scores[rows, tokens] = -torch.inf
    _apply_masks(scores, requests)
    return scores


def _is_adjusted(request: SamplingRequest) -> bool:
    has_rules = request.history is not None or request.allowed is not None
    return has_rules or bool(request.params.logit_bias or request.forbidden)


def _apply_masks(scores: Tensor, requests: Sequence[SamplingRequest]) -> None:
    """Set the logits of tokens that a mask excludes to -inf."""
    masks = [(row, r.allowed) for row, r in enumerate(requests) if r.allowed is not None]
    if not masks:
        return
    width = -(-scores.shape[-1] // 8)  # some masks have more bits than the vocabulary
    joined = bytearray().join(mask[:width].ljust(width, b"\0") for _, mask in masks)
    packed = torch.frombuffer(joined, dtype=torch.uint8)
    # Adding -inf from a table is several times faster than masked_fill_.
    entries = torch.nn.functional.embedding(
        packed.to(scores.device, torch.int32), _impossible(scores.device)
    )
    added = entries.reshape(len(masks), -1)[:, : scores.shape[-1]]
    if len(masks) == len(scores):
        scores += added
    else:
        rows = torch.tensor([row for row, _ in masks], device=scores.device)
        scores[rows] += added


@cache
def _impossible(device: torch.device) -> Tensor:
    """Return the value to add for each bit of each byte: 0 if the bit is set, else -inf."""
    bytes_, bits = torch.arange(256, device=device), torch.arange(8, device=device)
    is_set = (bytes_.unsqueeze(-1) >> bits) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(is_set == 0, -torch.inf)


def _repetition_penalties(request: SamplingRequest) -> Mapping[int, float]:
    penalty, history = request.params.repetition_penalty, request.history
    return {} if history is None or penalty == 1 else dict.fromkeys(history.tokens, penalty)


def _penalties(request: SamplingRequest) -> Mapping[int, float]:
    presence, frequency = request.params.presence_penalty, request.params.frequency_penalty
    if request.history is None or not (presence or frequency):
        return {}
    counts = request.history.counts
    return {token: -presence - count * frequency for token, count in counts.items()}


def _biases(request: SamplingRequest) -> Mapping[int, float]:
    return request.params.logit_bias or {}


def _forbidden(request: SamplingRequest) -> Mapping[int, float]:
    return dict.fromkeys(request.forbidden, 0.0)


def _columns(
    requests: Sequence[SamplingRequest],
    values: Callable[[SamplingRequest], Mapping[int, float]],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the token and the number of each of the requests' *values*."""
    entries = [(row, *item) for row, r in enumerate(requests) for item in values(r).items()]
    rows, tokens, numbers = zip(*entries, strict=True) if entries else ((),) * 3
    indices = torch.tensor([rows, tokens], dtype=torch.int64, device=device)
    return indices[0], indices[1], torch.tensor(numbers, dtype=torch.float64, device=device)


def _put(scores: Tensor, rows: Tensor, tokens: Tensor, new: Tensor) -> None:
    """Write logits. A penalty must not turn a finite logit into an infinite one."""
    old = scores[rows, tokens]
    limited = new.clamp(-_MAX_LOGIT, _MAX_LOGIT).float()
    scores[rows, tokens] = torch.where(old.isfinite(), limited, old)


# Temperature, top-k, top-p and min-p.


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
    return [(rows.tolist(), distribution) for rows, distribution in groups if len(rows)]


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
        min_p = [p.min_p for p in params]
        return cls(_column(top_k, like), _column(top_p, like), _column(min_p, like).log())

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


# The sampler.


class Sampler:
    """Samples the next token of each row. A platform may name another class.

    Penalties, bias and forbidden tokens change the logits first (see
    :func:`adjusted`). Then the temperature divides them,
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
        rows = [row for row, r in enumerate(requests) if r.params.logprobs is not None]
        if rows:
            tokens = [sampled[row].token_id for row in rows]
            counts = [requests[row].params.logprobs or 0 for row in rows]
            scores = token_logprobs(logits[rows], tokens, counts)
            for row, logprobs in zip(rows, scores, strict=True):
                sampled[row] = sampled[row]._replace(logprobs=logprobs)
        return sampled

    def launch(self, logits: Tensor) -> Tensor:
        """Sample plain requests without waiting for the device; the launches may be recorded.

        A platform's sampler that replaces ``__call__`` alone samples all requests with that.

        Args:
            logits: ``(rows, vocabulary)``, floating point; not changed.

        Returns:
            ``(rows,)``, int64, for :func:`read_tokens`.
        """
        return _best(logits.float())  # on the CPU, faster than in 16 bits


_NO_TOKEN = -1  # the largest logit is not finite


def read_tokens(tokens: Sequence[int]) -> list[Sampled]:
    """Return the tokens that :meth:`Sampler.launch` sampled.

    Raises:
        NonFiniteLogitsError: logits are NaN, or a row has no finite maximum.
    """
    if min(tokens) < 0:
        rows = [row for row, token in enumerate(tokens) if token < 0]
        raise non_finite("NaN or infinite", rows)
    return [Sampled(token) for token in tokens]


def sample(logits: Tensor, requests: Sequence[SamplingRequest]) -> list[int]:
    """Return a token for each row of *logits*; arguments and errors are those of a sampler."""
    scores = adjusted(logits, requests)
    tokens: list[int] = _best(scores.float()).tolist()
    _check_finite(tokens, logits)
    drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    for row, token in _draw(scores, requests, drawn):
        tokens[row] = token
    return tokens


def _best(scores: Tensor) -> Tensor:
    """Return the first largest score of each row, or -1 if it is not finite: ``(rows,)`` int64."""
    if scores.device.type != "cpu":
        best = scores.argmax(dim=-1, keepdim=True)
    else:  # NumPy's kernel is vectorized: 10 to 50 times as fast as torch's.
        best = torch.from_numpy(scores.detach().numpy().argmax(-1, keepdims=True))
    top = scores.gather(-1, best)  # NaN is the maximum
    return best.masked_fill_(~top.isfinite(), _NO_TOKEN).flatten()


def non_finite(kind: str, rows: Sequence[int]) -> NonFiniteLogitsError:
    """Return the error for logits of some rows that are *kind*: NaN or infinite."""
    return NonFiniteLogitsError(
        f"The model returned {kind} logits, and scores that are not finite choose no token. "
        "Try dtype='float32'; if that does not help, a weight or a kernel is wrong: opweave "
        "generate --explain shows which kernels ran.",
        rows=rows,
    )


def _check_finite(tokens: Sequence[int], logits: Tensor) -> None:
    if min(tokens) >= 0:
        return
    rows = [row for row, token in enumerate(tokens) if token < 0]
    raw = logits[rows].float()
    is_bad = raw.isnan().any(-1) | ~raw.amax(-1).isfinite()
    if broken := [row for row, bad in zip(rows, is_bad.tolist(), strict=True) if bad]:
        raise non_finite("NaN" if raw.isnan().any() else "infinite", broken)
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
    drawn: list[tuple[int, int]] = []
    if plain:
        weights = plain_weights(scores[plain], [requests[row].params for row in plain])
        tokens = _indices(weights, [requests[row] for row in plain]).flatten().tolist()
        drawn += zip(plain, tokens, strict=True)
    if cut:
        groups = cut_distributions(scores[cut], [requests[row].params for row in cut])
        for indices_in_cut, distribution in groups:
            group = [cut[index] for index in indices_in_cut]
            places = _indices(distribution.weights, [requests[row] for row in group])
            tokens = distribution.tokens.gather(-1, places).flatten().tolist()
            drawn += zip(group, tokens, strict=True)
    return drawn


def _indices(weights: Tensor, requests: Sequence[SamplingRequest]) -> Tensor:
    """Draw an index from each row with probabilities proportional to its weights."""
    numbers = [uniform(request.seed, request.place) for request in requests]
    drawn = torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(-1)
    cumulative = weights.cumsum(dim=-1)
    # A number is below 1, so the product is below the total, even rounded: a token with a weight.
    return torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)
