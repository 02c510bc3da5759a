"""The outputs of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from opweave_engine.errors import EngineError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at one position.

    Attributes:
        logprob: the natural logarithm of the probability.
        rank: 1 for the most likely token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One generated output of a prompt.

    Attributes:
        index: its index among the outputs of the prompt.
        text: the generated text, by default without special tokens and the stop string.
        token_ids: all generated tokens, including an end-of-text token.
        finish_reason: ``"stop"``: an end-of-text token, stop token or stop string; ``"length"``:
            ``max_tokens`` or the end of the context; ``"abort"``: the request was aborted;
            ``"error"``, in responses of the server: it failed; None: it is not finished, or the
            whole request failed.
        logprobs: for each token, the log-probabilities of the most likely tokens and of the token
            itself, by id; None: not requested.
        stop_reason: the stop string or stop token that ended it; None: another reason.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[Mapping[int, Logprob]] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestTimings:
    """Timestamps of a request, in seconds since it was added to the engine.

    Attributes:
        scheduled: when it was first scheduled.
        first_token: when its first token was generated.
        finished: when its last token was generated; 0 until then.
    """

    scheduled: float
    first_token: float
    finished: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its outputs so far, or a delta of them.

    Attributes:
        request_id: the client's name of the request.
        prompt: the prompt's text, or None if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: the outputs.
        finished: whether all outputs are finished.
        timings: timestamps of the request.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        prompt_logprobs: for each prompt token, as ``logprobs`` of an output, and None for the
            first; None: not requested.
        error: why the request failed; None: it did not fail.
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
    """The embedding of one prompt.

    Attributes:
        request_id: the name that the client gave the request.
        prompt_token_ids: the prompt's tokens.
        embedding: the vector, pooled and normalized as the checkpoint says.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]


@dataclass(frozen=True)
class ScoreOutput:
    """The score of one pair of texts.

    Attributes:
        request_id: the name of the request.
        prompt_token_ids: the tokens of the pair.
        score: the model's logit, after the checkpoint's activation function.
    """

    request_id: str
    prompt_token_ids: list[int]
    score: float
