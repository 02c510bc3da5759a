"""Sets of tokens as bits: one per token, the lowest bit of a byte first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

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
    found = np.frombuffer(one, np.uint8, width) & np.frombuffer(two, np.uint8, width)
    return found.tobytes()
