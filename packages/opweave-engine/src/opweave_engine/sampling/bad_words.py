"""Bad words: words that must not be generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opweave_engine.tokenization.tokenizer import Tokenizer

# The text before a word affects how it is tokenized: nothing, a space, or other text.
_BEFORE = ("", " ", "\n")


class BadWords:
    """The token sequences that must not be generated.

    Args:
        words: the words.
        tokenizer: tokenizes them.
    """

    def __init__(self, words: Iterable[str], tokenizer: Tokenizer) -> None:
        found = (_sequence(word, before, tokenizer) for word in words for before in _BEFORE)
        self._sequences = sorted({ids for ids in found if ids})

    def __bool__(self) -> bool:
        return bool(self._sequences)

    @property
    def single(self) -> frozenset[int]:
        """The tokens that are a bad word by themselves, which are never sampled."""
        return frozenset(ids[0] for ids in self._sequences if len(ids) == 1)

    def forbidden(self, answer: Sequence[int]) -> set[int]:
        """Return the tokens that would complete a bad word after the tokens of *answer*."""
        return {
            ids[-1]
            for ids in self._sequences
            if len(ids) - 1 <= len(answer)
            and list(ids[:-1]) == list(answer[len(answer) - len(ids) + 1 :])
        }


def _sequence(word: str, before: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tokenizer.encode(before + word, add_special_tokens=False)
    if before != "\n":  # a space is part of the word's first token
        return tuple(ids)
    start = tokenizer.encode(before, add_special_tokens=False)
    return tuple(ids[len(start) :]) if ids[: len(start)] == start else ()
