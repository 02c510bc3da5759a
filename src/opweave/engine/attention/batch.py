"""The sequences of one forward, as an attention backend sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Packed sequences, and the cache blocks of their earlier tokens in a group of layers.

    Sequences with one new token come first.

    Attributes:
        query_starts: ``(sequences + 1,)``, int32: where each sequence's new tokens begin.
        seq_lens: ``(sequences,)``, int32: tokens of each, new ones included.
        key_starts: ``(sequences + 1,)``, int32: the sums of *seq_lens* before each.
        block_tables: ``(sequences, most blocks)``, int32; 0 for blocks that are not needed.
        slot_mapping: ``(tokens,)``, int64: where each new token goes; -1: nowhere.
        num_decodes: how many sequences, from the first, have one new token.
    """

    query_starts: Tensor
    seq_lens: Tensor
    key_starts: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_decodes: int

    @property
    def num_prefills(self) -> int:
        """How many sequences have more than one new token."""
        return self.seq_lens.shape[0] - self.num_decodes
