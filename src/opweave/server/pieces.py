"""What is new in an answer that grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opweave.engine import CompletionOutput, FinishReason, Logprob


@dataclass(frozen=True)
class Piece:
    """What an answer has gained since the last piece.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        logprobs: theirs, if they were asked for.
        start: where the text begins in the answer.
        finish_reason: why the answer is complete, or None if it is not.
        stop_reason: what stopped it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[Mapping[int, Logprob]] | None
    start: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def __bool__(self) -> bool:
        return bool(self.text or self.finish_reason or self.logprobs)


class Growth:
    """Cuts one growing answer into pieces.

    Text that may turn out to be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._ends = [_Beginning(text) for text in stop]
        self._seen = self._characters = self._tokens = 0

    def piece(self, answer: CompletionOutput) -> Piece:
        """Return what is new."""
        text = answer.text
        if answer.finish_reason is None:
            text = text[: len(text) - self._undecided(text)]
        start, first = self._characters, self._tokens
        self._characters, self._tokens = max(start, len(text)), len(answer.token_ids)
        return Piece(
            text[start:],
            answer.token_ids[first:],
            None if answer.logprobs is None else answer.logprobs[first:],
            start,
            answer.finish_reason,
            answer.stop_reason,
        )

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of *text* with which a stop string begins."""
        new, self._seen = text[self._seen :], len(text)
        return max((end.read(new) for end in self._ends), default=0)


class _Beginning:
    """How much of the beginning of *stop* a growing text ends with; never all of it.

    By the failure function of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J.
    Comput. 6 (1977): every character is looked at a constant number of times, however long *stop*.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self._shorter = stop, [0]
        self._length = 0
        for character in stop[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def read(self, text: str) -> int:
        """Return the length after *text* has been added."""
        for character in text:
            self._length = self._next(self._length, character)
            if self._length == len(self._stop):
                self._length = self._shorter[-1]
        return self._length

    def _next(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._shorter[length - 1]
        return length + (self._stop[length] == character)
