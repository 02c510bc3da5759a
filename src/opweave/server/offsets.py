"""Where tokens begin in the text that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave.engine import Tokenizer
from opweave.engine.tokenization.incremental_decoder import IncrementalDecoder


class Offsets:
    """Finds the places of an answer's tokens, piece by piece.

    A token without a text of its own begins where the next one does: the first bytes of a
    character, and a special token that is left out.

    Args:
        tokenizer: of the tokens.
        prompt: the tokens before.
        start: how long the text before is.
        skip_special_tokens: whether they are left out.
        spaces_between_special_tokens: whether the space between two of them is kept.
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
        """Return the places of the next tokens."""
        places = []
        for token in token_ids:
            places.append(self._place)
            self._place += len(self._decoder.push(token))
        return places


def prompt_offsets(tokenizer: Tokenizer, token_ids: Iterable[int], text: str) -> list[int]:
    """Return where the tokens of a prompt begin in its text.

    A special token counts where the text has it; it may be one that the tokenizer has added.
    """
    decoder, places, place = IncrementalDecoder(tokenizer), [], 0
    for token in token_ids:
        places.append(place)
        if token not in tokenizer.special_ids:
            place += len(decoder.push(token))
        elif text.startswith(special := tokenizer.piece(token), place):
            place += len(special)
    return [min(place, len(text)) for place in places]
