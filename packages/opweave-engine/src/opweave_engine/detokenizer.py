"""Incremental detokenization of one output, with stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opweave_engine.sampling.params import SamplingParams
from opweave_engine.tokenizer import REPLACEMENT, Tokenizer, completes

# Incremental decoder: text from tokens that arrive one by one.


_CONTEXT_TOKENS = 8  # preceding tokens that decide how the next one is decoded
_CONTINUATION_BYTES = 3  # bytes of a character after its first one
_MAX_PENDING_TOKENS = 16  # tokens that end inside a character, before the context moves on


class IncrementalDecoder:
    """Turns tokens into text as they arrive.

    The returned text never ends inside a character, and all of it together is the text that the
    tokens add to the prompt's. A U+FFFD that tokens write, or that stands for bytes that never
    become a character, is returned like any other character.

    Args:
        tokenizer: the tokenizer.
        prompt: the tokens of the prompt.
        skip_special_tokens: skip special tokens.
        spaces_between_special_tokens: keep the space that some tokenizers write between two
            special tokens.
        kept_special_tokens: special tokens that are never skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_special_tokens: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        skipped = tokenizer.special_ids.difference(kept_special_tokens)
        self._skipped = skipped if skip_special_tokens else frozenset()
        # The tokenizer leaves all special tokens out, or none.
        self._skips = skip_special_tokens and not kept_special_tokens
        if kept_special_tokens:
            prompt = [token for token in prompt if token not in self._skipped]
        self._spaces = skip_special_tokens or spaces_between_special_tokens
        # Decoders treat the first token of a text differently (they drop its space), so each
        # piece is decoded behind the one before it.
        self._context = self._from_character(prompt, max(0, len(prompt) - _CONTEXT_TOKENS))
        self._pending: list[int] = []
        # The text before, with U+FFFD for a character that the prompt has begun; the same without
        # it; and its bytes.
        self._seen = self._decode(self._context)
        self._whole, self._begun = self._without_incomplete(self._context)
        self._is_behind_special = False

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
    ) -> IncrementalDecoder:
        """Return the decoder of an output that continues *prompt*."""
        options = ("skip_special_tokens", "spaces_between_special_tokens", "kept_special_tokens")
        return cls(tokenizer, prompt, **{name: getattr(params, name) for name in options})

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* completes; empty while a character is incomplete."""
        fixed = self._tokenizer.fixed_text(token_id)
        if fixed and self._seen and not (self._pending or self._begun):  # nothing to decode
            self._context, self._is_behind_special = [token_id], False
            self._seen = self._whole = fixed[1]
            return fixed[0]
        is_special = token_id in self._tokenizer.special_ids
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text, incomplete = self._without_incomplete(self._context + self._pending)
        new = self._new(text)
        if not incomplete:
            # Tokens without a text of their own can decide how the next one is decoded.
            self._move(len(self._pending) if new else _CONTEXT_TOKENS)
        elif new:
            self._seen = self._whole = text
            self._begun = b""
            if len(self._pending) > _MAX_PENDING_TOKENS:
                self._move(_CONTEXT_TOKENS)
        if is_special and self._is_behind_special and not self._spaces:
            new = new.removeprefix(" ")
        self._is_behind_special = is_special
        return new

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that stays incomplete."""
        text = self._decode(self._context + self._pending) if self._pending else self._seen
        self._pending = []
        return text[len(self._seen) :]

    def _move(self, count: int) -> None:
        """Decode the next tokens behind the last *count* ones, or a few more."""
        tokens = self._context + self._pending
        start = max(0, len(tokens) - count)
        self._context, self._pending = self._from_character(tokens, start), []
        self._whole, _ = self._without_incomplete(self._context)
        self._seen, self._begun = self._whole, b""

    def _from_character(self, ids: Sequence[int], start: int) -> list[int]:
        """Return *ids* from *start* on, or from the token before in which a character begins.

        Where bytes are tokens, part of a character spoils all bytes after it.
        """
        least = max(0, start - _CONTINUATION_BYTES) if self._tokenizer.has_byte_tokens else start
        # Bytes 0x80 to 0xBF continue a character.
        while start > least and b"\x80" <= self._tokenizer.bytes_in_text(ids[start])[:1] < b"\xc0":
            start -= 1
        return list(ids[start:])

    def _new(self, text: str) -> str:
        """Return what is new in *text*, of which all characters are complete."""
        if self._begun:
            following = b"".join(map(self._tokenizer.bytes_in_text, self._pending))
            if completes(self._begun, following):
                # The prompt's U+FFFD becomes a character, which is part of the answer.
                return text[len(self._whole) :]
        if text.startswith(self._seen):
            return text[len(self._seen) :]
        if len(text) <= len(self._seen):  # the next character is still incomplete
            return ""
        return self._decode(self._pending)  # bytes after a character can make it U+FFFD, too

    def _without_incomplete(self, ids: list[int]) -> tuple[str, bytes]:
        """Return the text of *ids* up to an incomplete character, and the bytes of that."""
        text = self._decode(ids)
        if not text.endswith(REPLACEMENT):
            return text, b""
        if self._skips:
            ids = [token for token in ids if token not in self._tokenizer.special_ids]
        incomplete = self._tokenizer.incomplete_bytes(ids)
        if not incomplete:
            return text, b""
        if self._tokenizer.has_byte_tokens:  # each of its bytes is a token and a U+FFFD
            return self._decode(ids[: -len(incomplete)]), incomplete
        return text.removesuffix(REPLACEMENT), incomplete

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)


# Incremental stop-string matcher.


class StopMatcher:
    """Tracks how much of a stop string the text so far ends with.

    Uses the failure function of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM
    J. Comput. 6 (1977), so that each character takes amortized constant time.

    Args:
        stop: the stop string, not empty.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self._fallback = stop, [0]
        self._length = 0
        for character in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def read(self, text: str) -> int:
        """Add *text*, and return the length of the longest proper prefix that it now ends with."""
        for character in text:
            self._length = self._next(self._length, character)
            if self._length == len(self._stop):
                self._length = self._fallback[-1]
        return self._length

    def _next(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._fallback[length - 1]
        return length + (self._stop[length] == character)


# Both together: the detokenizer of one output.


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
        return cls(
            IncrementalDecoder.of(tokenizer, prompt, params),
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
        piece = self._decoder.push(token_id)
        if self._matchers:
            self._add(piece)
        elif piece:  # without stop strings, nothing is held back
            self._pieces.append(piece)

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

    def _cut(self, text: str, num_held: int) -> str:
        """Return *text* up to the first stop string that ends after *num_held* characters."""
        # It may begin in the text that was held back, but no earlier: that is why it was held back.
        starts = {stop: text.find(stop, max(0, num_held - len(stop) + 1)) for stop in self._stop}
        matches = [stop for stop in self._stop if starts[stop] >= 0]
        if not matches:
            return text
        self.stopped_by = stop = min(matches, key=starts.__getitem__)
        return text[: starts[stop] + (len(stop) if self._includes_stop else 0)]
