"""What is new in an answer that grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opweave.engine import CompletionOutput, FinishReason, Logprob


@dataclass(frozen=True)
class Piece:
    """What an answer has gained since the last piece.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        logprobs: theirs, if they were asked for.
        finish_reason: why the answer is complete; None if it is not, or if a piece before said so.
        stop_reason: what stopped it, with the reason.
    """

    text: str
    token_ids: list[int]
    logprobs: list[Mapping[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def __bool__(self) -> bool:
        return bool(self.text or self.finish_reason or self.logprobs)


class Growth:
    """Cuts one growing answer into pieces."""

    def __init__(self) -> None:
        self._characters = self._tokens = 0
        self._has_ended = False

    def piece(self, answer: CompletionOutput) -> Piece:
        """Return what is new."""
        start, first = self._characters, self._tokens
        self._characters, self._tokens = len(answer.text), len(answer.token_ids)
        ends = answer.finish_reason is not None and not self._has_ended
        self._has_ended = self._has_ended or ends
        return Piece(
            answer.text[start:],
            answer.token_ids[first:],
            None if answer.logprobs is None else answer.logprobs[first:],
            answer.finish_reason if ends else None,
            answer.stop_reason if ends else None,
        )
