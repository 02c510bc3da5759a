"""What a request returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: its place among the answers to the prompt.
        text: the text, without special tokens and without the stop string.
        token_ids: every token that was generated, an end-of-text token included.
        finish_reason: ``"stop"`` at an end-of-text token or a stop string; ``"length"`` at
            ``max_tokens`` or the end of the context.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class RequestTimings:
    """How long a request took, in seconds since it was handed to the engine.

    Attributes:
        first_token: until its first token.
        finished: until its last.
    """

    first_token: float
    finished: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        prompt: the prompt's text, or None if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: its answers; one.
        timings: how long it took.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: RequestTimings
