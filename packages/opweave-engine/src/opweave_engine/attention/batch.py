"""The sequences of one forward pass, for attention backends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Packed sequences, and the cache blocks of their earlier tokens in a group of layers.

    Sequences with one new token come first.

    Attributes:
        query_starts: ``(sequences + 1,)``, int32: the first new token of each sequence.
        seq_lens: ``(sequences,)``, int32: the length of each sequence, including new tokens.
        key_starts: ``(sequences + 1,)``, int32: the cumulative sums of *seq_lens*.
        block_tables: ``(sequences, max blocks)``, int32; 0 for blocks that are not needed.
        slot_mapping: ``(tokens,)``, int64: the cache slot of each new token, or -1.
        num_decodes: the number of leading sequences with one new token.
    """

    query_starts: Tensor
    seq_lens: Tensor
    key_starts: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_decodes: int

    @property
    def num_prefills(self) -> int:
        """The number of sequences with more than one new token."""
        return self.seq_lens.shape[0] - self.num_decodes
