"""The outputs of requests, and pooling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from opweave_engine.errors import EngineError, SamplingParamsError
from opweave_engine.sampling.params import check_flag, check_int

# The outputs of requests. Those of a step are not frozen, which would take twice as long.


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


@dataclass
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


@dataclass
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


@dataclass
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


# Pooling parameters of one prompt.


@dataclass(frozen=True)
class PoolingParams:
    """Pooling of one prompt's embedding.

    Attributes:
        dimensions: truncate the vector to this many numbers; None: all. The model must be trained
            for it: its ``config.json`` has ``matryoshka_dimensions`` or ``is_matryoshka``.
        normalize: normalize the vector to length 1; None: as in the checkpoint.
        token_type_ids: of a pair of texts, one for each token of the prompt: a cross-encoder scores
            the pair, and the score is the only number of the vector. None: the prompt is one text.

    Raises:
        SamplingParamsError: a value is out of range or of the wrong type.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    token_type_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, "or None for all")
        if self.normalize is not None:
            check_flag("normalize", self.normalize)

    def check_dimensions(self, size: int, trained: object, *, any_size: bool) -> None:
        """Check that the model supports the dimensions.

        Args:
            size: the size of the model's vectors.
            trained: the dimensions that the model was trained for, or None.
            any_size: whether it was trained for any number of dimensions.

        Raises:
            SamplingParamsError: it does not.
        """
        dimensions = self.dimensions
        if dimensions is None or dimensions == size:
            return
        sizes = trained if isinstance(trained, list) else []
        if dimensions in sizes or (any_size and not sizes and dimensions < size):
            return
        others = ", ".join(map(str, sizes)) or ("fewer" if any_size else "no other length")
        raise SamplingParamsError(
            f"{dimensions=} is not possible: the model's vectors have {size} numbers, and it was "
            f"trained for {others}.",
            "dimensions",
        )
