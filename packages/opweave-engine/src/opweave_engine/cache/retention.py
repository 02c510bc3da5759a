"""Retention policies: which blocks of a sequence a group of layers still needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Retention(Protocol):
    """The blocks of a sequence that a group of layers keeps.

    Attributes:
        shares_prefixes: whether other sequences can reuse the blocks of a prefix.
    """

    @property
    def shares_prefixes(self) -> bool: ...

    def first_block(self, num_computed: int, block_size: int) -> int:
        """Return the first block that tokens after the first *num_computed* ones read."""

    def end_block(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks that *num_tokens* tokens need, counted from the start."""


@dataclass(frozen=True, slots=True)
class EveryToken:
    """Keeps every token: full attention."""

    shares_prefixes: bool = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Window:
    """Keeps the last *size* tokens, including the current one: a sliding window."""

    size: int
    shares_prefixes: bool = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        return max(0, num_computed + 1 - self.size) // block_size

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One state per sequence, regardless of its length: a state-space layer.

    The next token overwrites the state, so other sequences cannot reuse it.
    """

    shares_prefixes: bool = False

    def first_block(self, num_computed: int, block_size: int) -> int:
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return 1
