"""The tokens that penalties, bad words and masks of allowed tokens refer to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from opweave_engine.sampling.params import SamplingParams
from opweave_engine.tokenizer import Tokenizer

# Sets of tokens as bits: one per token, the lowest bit of a byte first.


_WORD = 32  # bits; grammars fill whole words


def token_mask(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Return the mask of some tokens of a vocabulary."""
    bits = np.zeros(-(-vocab_size // _WORD) * _WORD, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def intersection(one: bytes | None, two: bytes | None) -> bytes | None:
    """Return the tokens that both masks have; None has all tokens."""
    if one is None or two is None:
        return two if one is None else one
    width = min(len(one), len(two))  # a tokenizer may have tokens that its model does not
    return (np.frombuffer(one, np.uint8, width) & np.frombuffer(two, np.uint8, width)).tobytes()


# The tokens that penalties apply to.


@dataclass(slots=True)
class History:
    """The tokens of a prompt, and the token counts of its output.

    Attributes:
        prompt: all tokens of the prompt.
        counts: how often the output has each token.
    """

    prompt: frozenset[int]
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams) -> History | None:
        """Return the history of a new output, or None if *params* set no penalty."""
        return cls(frozenset(prompt)) if params.penalizes else None

    @property
    def tokens(self) -> frozenset[int]:
        """All tokens of the prompt and the output."""
        return self.prompt | self.counts.keys()


# Bad words: words that must not be generated.


# The text before a word affects how it is tokenized: nothing, a space, or other text.
_BEFORE = ("", " ", "\n")


class BadWords:
    """The token sequences that must not be generated.

    Args:
        words: the words.
        tokenizer: tokenizes them.
    """

    def __init__(self, words: Iterable[str], tokenizer: Tokenizer) -> None:
        sequences = {_sequence(word, before, tokenizer) for word in words for before in _BEFORE}
        self._sequences = sorted(sequences - {()})

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
