"""Packed sequences for input generators."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_lengths(num_tokens: int, num_seqs: int) -> list[int]:
    """Divide tokens over sequences: one for the first, the rest as evenly as it goes.

    As many sequences as tokens are a batch that decodes; with more, some have none.

    >>> sequence_lengths(8, 3), sequence_lengths(3, 3), sequence_lengths(1, 2)
    ([1, 4, 3], [1, 1, 1], [1, 0])
    """
    if num_seqs == 1:
        return [num_tokens]
    first = min(num_tokens, 1)
    least, more = divmod(num_tokens - first, num_seqs - 1)
    return [first, *(least + (i < more) for i in range(num_seqs - 1))]


def boundaries(lengths: Sequence[int], device: str) -> Tensor:
    """Return where each sequence starts, and the last one ends: int32, ``(len(lengths) + 1,)``."""
    sums = torch.tensor([0, *lengths], device=device).cumsum(0)
    return sums.to(torch.int32)
