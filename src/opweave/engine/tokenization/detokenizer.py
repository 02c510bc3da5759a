"""The text of an answer while it grows, and the texts that end it."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.engine.sampling.sampling_params import SamplingParams
from opweave.engine.tokenization.incremental_decoder import IncrementalDecoder
from opweave.engine.tokenization.stop_matcher import StopMatcher
from opweave.engine.tokenization.tokenizer import Tokenizer


class Detokenizer:
    """The text that tokens add up to, cut before or after the first stop string.

    Args:
        decoder: turns the tokens into text.
        stop: texts that end the answer.
        min_tokens: a stop string that is complete before this many tokens does not end it.
        include_stop: the text ends with the stop string.

    Attributes:
        stopped_by: the stop string that ended the answer, or None. Of several that begin at the
            same place, the longest.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stop: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.stopped_by: str | None = None
        self._decoder, self._min_tokens, self._includes_stop = decoder, min_tokens, include_stop
        self._stop = sorted(stop, key=len, reverse=True)
        self._beginnings = [StopMatcher(text) for text in stop]
        self._text, self._decided, self._tokens = "", 0, 0
        self._is_finished = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> Detokenizer:
        """Return the empty text behind the tokens of a prompt."""
        decoder = IncrementalDecoder(
            tokenizer,
            prompt,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            kept_special_tokens=params.kept_special_tokens,
        )
        return cls(
            decoder,
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """The text so far, without an end that may be the beginning of a stop string.

        It only ever grows: what was in it once stays.
        """
        return self._text[: self._decided]

    def push(self, token_id: int) -> None:
        """Add a token's text."""
        self._tokens += 1
        self._add(self._decoder.push(token_id))

    def finish(self) -> None:
        """Add the text of an incomplete character at the end, and all that was held back."""
        if not self.is_stopped:
            self._is_finished = True
            self._add(self._decoder.finish())

    def _add(self, piece: str) -> None:
        known = len(self._text)
        self._text += piece
        # The longest end of the text with which a stop string begins.
        undecided = max((beginning.read(piece) for beginning in self._beginnings), default=0)
        if self._tokens >= self._min_tokens:
            self._look_for_stop(known)
        # Once it is decided, it is whole: nothing comes after a stop string or the end.
        is_whole = self._is_finished or self.is_stopped
        self._decided = len(self._text) - (0 if is_whole else undecided)

    def _look_for_stop(self, known: int) -> None:
        # A stop string may begin in the text before and end in this piece.
        places = (
            (self._text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stop
        )
        found = min((each for each in places if each[0] >= 0), key=lambda e: e[0], default=None)
        if found is not None:
            place, self.stopped_by = found
            kept = len(self.stopped_by) if self._includes_stop else 0
            self._text = self._text[: place + kept]
