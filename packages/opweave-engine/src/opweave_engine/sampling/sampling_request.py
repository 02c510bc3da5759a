"""Input and output of the sampler for one row: plain data that any process can read."""

from __future__ import annotations

from typing import NamedTuple

from opweave_engine.sampling.history import History
from opweave_engine.sampling.logprobs import TokenLogprob
from opweave_engine.sampling.sampling_params import SamplingParams


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
