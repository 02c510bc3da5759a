"""Positions of tokens in the detokenized text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave_engine.tokenization.incremental_decoder import IncrementalDecoder
from opweave_engine.tokenization.tokenizer import Tokenizer


class Offsets:
    """Computes the positions of an answer's tokens incrementally.

    A token without text (the first bytes of a character, or a skipped special token) has the
    position of the next token.

    Args:
        tokenizer: the tokenizer.
        prompt: the tokens of the prompt.
        start: the length of the text before the answer.
        skip_special_tokens: whether special tokens are skipped.
        spaces_between_special_tokens: whether the space between special tokens is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer,
            prompt,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._place = start

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Return the positions of the next tokens."""
        places = []
        for token in token_ids:
            places.append(self._place)
            self._place += len(self._decoder.push(token))
        return places


def prompt_offsets(tokenizer: Tokenizer, token_ids: Iterable[int], text: str) -> list[int]:
    """Return the positions of the tokens of a prompt in its text.

    A special token in the text has its position there, even if the tokenizer added it.
    """
    decoder, places, place = IncrementalDecoder(tokenizer), [], 0
    for token in token_ids:
        places.append(place)
        if token not in tokenizer.special_ids:
            place += len(decoder.push(token))
        elif text.startswith(special := tokenizer.piece(token), place):
            place += len(special)
    return [min(place, len(text)) for place in places]
