"""The tokens that the grammar of an answer allows next."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opweave_engine.errors import SamplingParamsError


class TokenMask(NamedTuple):
    """The tokens that may come next, one bit per token, the lowest bit of a byte first.

    Attributes:
        allowed: the allowed tokens, without end-of-text tokens if the request ignores those.
        is_last: whether only an end-of-text token may follow, so that the answer is complete.
    """

    allowed: bytes
    is_last: bool

    @classmethod
    def of(cls, words: NDArray[np.uint8], eos: NDArray[np.uint8], *, ignore_eos: bool) -> TokenMask:
        """Return the mask of a row that llguidance has filled.

        Args:
            words: the row, as bytes.
            eos: the bits of the end-of-text tokens.
            ignore_eos: whether the request continues after an end-of-text token.
        """
        text = words & ~eos
        is_last = not text.any()
        return cls((text if ignore_eos and not is_last else words).tobytes(), is_last)


class GrammarState:
    """The position of one answer in its grammar.

    It does not depend on KV blocks, so preemption does not change it.
    :meth:`GrammarCompiler.advance` updates it.

    Attributes:
        matcher: llguidance's matcher.
        ignore_eos: whether the request continues after an end-of-text token.
        mask: the tokens that may come next.
        error: why the answer cannot follow the grammar any further, or None.
    """

    def __init__(self, matcher: Any, mask: TokenMask, *, ignore_eos: bool) -> None:
        self.matcher, self.mask, self.ignore_eos = matcher, mask, ignore_eos
        self.error: SamplingParamsError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and cannot continue."""
        return self.mask.is_last

    def leaves_any(self, forbidden: tuple[int, ...]) -> bool:
        """Whether the grammar allows a token that is not *forbidden*."""
        rest = np.frombuffer(self.mask.allowed, np.uint8).copy()
        for token in forbidden:
            rest[token // 8] &= ~np.uint8(1 << token % 8)
        return bool(rest.any())
