"""Incremental decoder: text from tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opweave_engine.tokenization.token_bytes import REPLACEMENT, completes
from opweave_engine.tokenization.tokenizer import Tokenizer

_CONTEXT = 8  # tokens before that decide how the next one is decoded
_CONTINUATION = 3  # bytes of a character after its first one
_MOST_PENDING = 16  # tokens without a place between two characters, before the context moves on


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
        self._context = self._from_character(prompt, max(0, len(prompt) - _CONTEXT))
        self._pending: list[int] = []
        # The text before, with U+FFFD for a character that the prompt has begun; the same without
        # it; and its bytes.
        self._seen = self._decode(self._context)
        self._whole, self._begun = self._without_incomplete(self._context)
        self._is_behind_special = False

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* completes; empty while a character is incomplete."""
        is_special = token_id in self._tokenizer.special_ids
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text, incomplete = self._without_incomplete(self._context + self._pending)
        new = self._new(text)
        if not incomplete:
            # Tokens without a text of their own can decide how the next one is decoded.
            self._move(len(self._pending) if new else _CONTEXT)
        elif new:
            self._seen = self._whole = text
            self._begun = b""
            if len(self._pending) > _MOST_PENDING:
                self._move(_CONTEXT)
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
        known = self._context + self._pending
        self._context, self._pending = self._from_character(known, max(0, len(known) - count)), []
        self._whole, _ = self._without_incomplete(self._context)
        self._seen, self._begun = self._whole, b""

    def _from_character(self, ids: Sequence[int], start: int) -> list[int]:
        """Return *ids* from *start* on, or from the token before in which a character begins.

        Where bytes are tokens, part of a character spoils all bytes after it.
        """
        least = max(0, start - _CONTINUATION) if self._tokenizer.has_byte_tokens else start
        while start > least and _continues(self._tokenizer.bytes_in_text(ids[start])):
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
        kept = [i for i in ids if i not in self._tokenizer.special_ids] if self._skips else ids
        bytes_ = self._tokenizer.incomplete_bytes(kept)
        if not bytes_:
            return text, b""
        if self._tokenizer.has_byte_tokens:  # each of its bytes is a token and a U+FFFD
            return self._decode(kept[: -len(bytes_)]), bytes_
        return text.removesuffix(REPLACEMENT), bytes_

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)


def _continues(text: bytes) -> bool:
    return bool(text) and 0x80 <= text[0] < 0xC0
