"""What a request returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from opweave.engine.errors import EngineError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The probability of one token at one place.

    Attributes:
        logprob: its natural logarithm.
        rank: 1 for the most likely token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: its place among the answers to the prompt.
        text: the text, without special tokens and the stop string unless the request wants them.
        token_ids: every token that was generated, an end-of-text token included.
        finish_reason: ``"stop"`` at an end-of-text token or a stop string; ``"length"`` at
            ``max_tokens`` or the end of the context; ``"abort"``: it was given up; ``"error"``, in
            responses of the server: it failed; None: it goes on, or the whole request failed.
        logprobs: for each token, the most likely ones at its place and itself, by id; None: they
            were not asked for.
        stop_reason: the stop string or the stop token that ended it; None: something else did.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[Mapping[int, Logprob]] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestTimings:
    """When things happened to a request, in seconds since it was handed to the engine.

    Attributes:
        scheduled: its first token was computed from here on; before, it waited.
        first_token: its first token was there.
        finished: its last token was there; 0 while it goes on.
    """

    scheduled: float
    first_token: float
    finished: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers so far.

    Attributes:
        request_id: the name that its sender gave it.
        prompt: the prompt's text, or None if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: its answers.
        finished: whether every answer is complete.
        timings: when what happened.
        num_cached_tokens: tokens of the prompt whose keys and values were there already.
        prompt_logprobs: for each token of the prompt, as ``logprobs`` of an answer, and None for
            the first; None: they were not asked for.
        error: why it failed, and no answer is complete; None: it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    timings: RequestTimings
    num_cached_tokens: int = 0
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    error: EngineError | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt.

    Attributes:
        request_id: the name that its sender gave it.
        prompt_token_ids: the prompt's tokens.
        embedding: the vector, as the checkpoint says it is pooled and normalised.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
