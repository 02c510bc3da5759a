"""The text of an answer while it grows, and the texts that end it."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.engine.tokenizer import IncrementalDecoder


class Completion:
    """The text that tokens add up to, cut before the first stop string.

    Args:
        decoder: turns the tokens into text.
        stop: texts that end the answer.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: Sequence[str]) -> None:
        self.text = ""
        self.is_stopped = False
        self._decoder, self._stop = decoder, stop

    def push(self, token_id: int) -> None:
        """Add a token's text."""
        self._add(self._decoder.push(token_id))

    def finish(self) -> None:
        """Add the text of an incomplete character at the end."""
        if not self.is_stopped:
            self._add(self._decoder.finish())

    def _add(self, piece: str) -> None:
        known = len(self.text)
        self.text += piece
        # A stop string may begin in the text before and end in this piece.
        found = [self.text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop]
        places = [place for place in found if place >= 0]
        if places:
            self.text, self.is_stopped = self.text[: min(places)], True
