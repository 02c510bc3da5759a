"""Incremental detokenization of one output, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from opweave_engine.sampling.sampling_params import SamplingParams
from opweave_engine.tokenization.incremental_decoder import IncrementalDecoder
from opweave_engine.tokenization.stop_matcher import StopMatcher
from opweave_engine.tokenization.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one output into text, up to the first stop string.

    Text that may be the beginning of a stop string is held back until later tokens decide, so
    returned text is never retracted.

    Args:
        decoder: decodes the tokens.
        stop: stop strings.
        min_tokens: stop strings that end before this many tokens are ignored.
        include_stop: keep the stop string at the end of the text.

    Attributes:
        stopped_by: the stop string that ended the output, or None. If several start at the same
            position, the longest.
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
        self._matchers = [StopMatcher(text) for text in stop]
        self._pieces: list[str] = []
        self._held = ""
        self._num_taken = self._tokens = 0
        self._is_finished = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> Detokenizer:
        """Return the detokenizer of an output that continues *prompt*."""
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
        """Whether a stop string ended the output."""
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """All text so far, without the text that is held back."""
        return "".join(self._pieces)

    def take(self) -> str:
        """Return the text since the last call, without the text that is held back."""
        new = self._pieces[self._num_taken :]
        self._num_taken = len(self._pieces)
        return "".join(new)

    def push(self, token_id: int) -> None:
        """Add a token's text."""
        self._tokens += 1
        self._add(self._decoder.push(token_id))

    def finish(self) -> None:
        """Release the text that was held back, and U+FFFD for an incomplete character."""
        if not self.is_stopped:
            self._is_finished = True
            self._add(self._decoder.finish())

    def _add(self, piece: str) -> None:
        text = self._held + piece
        undecided = max((matcher.read(piece) for matcher in self._matchers), default=0)
        if self._tokens >= self._min_tokens:
            text = self._cut(text, len(self._held))
        # After a stop string or the end, nothing can complete the text that is held back.
        is_last = self._is_finished or self.is_stopped
        decided = len(text) - (0 if is_last else undecided)
        self._held = text[decided:]
        if decided:
            self._pieces.append(text[:decided])

    def _cut(self, text: str, known: int) -> str:
        """Return *text* up to the first stop string that ends after *known* characters."""
        # It may begin in the text that was held back, but no earlier: that is why it was held back.
        places = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stop)
        found = min((each for each in places if each[0] >= 0), key=lambda e: e[0], default=None)
        if found is None:
            return text
        place, self.stopped_by = found
        return text[: place + (len(self.stopped_by) if self._includes_stop else 0)]
