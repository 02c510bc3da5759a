"""Which blocks of a sequence a group of layers still needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Retention(Protocol):
    """What a group of layers keeps of each sequence.

    Attributes:
        shares_prefixes: whether what is kept of a prefix serves another sequence, too.
    """

    @property
    def shares_prefixes(self) -> bool: ...

    def first_block(self, num_computed: int, block_size: int) -> int:
        """Return the first block that tokens after the *num_computed* first ones read."""

    def end_block(self, num_tokens: int, block_size: int) -> int:
        """Return the end of the blocks that *num_tokens* tokens are kept in."""


@dataclass(frozen=True, slots=True)
class EveryToken:
    """Every token is kept: full attention."""

    shares_prefixes: bool = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Window:
    """The last *size* tokens are kept, the one that reads them included: a sliding window."""

    size: int
    shares_prefixes: bool = True

    def first_block(self, num_computed: int, block_size: int) -> int:
        return max(0, num_computed + 1 - self.size) // block_size

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One state is kept, of whatever length the sequence is: a state-space layer.

    The state after a prefix is overwritten by the next token, so that nobody else can use it.
    """

    shares_prefixes: bool = False

    def first_block(self, num_computed: int, block_size: int) -> int:
        return 0

    def end_block(self, num_tokens: int, block_size: int) -> int:
        return 1
