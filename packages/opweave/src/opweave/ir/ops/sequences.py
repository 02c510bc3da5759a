"""Lengths of packed sequences for input generators."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_lengths(num_tokens: int, num_seqs: int) -> list[int]:
    """Divide tokens among sequences: one for the first, the rest as evenly as possible.

    With as many sequences as tokens, all of them decode; with more, some are empty.

    >>> sequence_lengths(8, 3), sequence_lengths(3, 3), sequence_lengths(1, 2)
    ([1, 4, 3], [1, 1, 1], [1, 0])
    """
    if num_seqs == 1:
        return [num_tokens]
    first = min(num_tokens, 1)
    least, more = divmod(num_tokens - first, num_seqs - 1)
    return [first, *(least + (i < more) for i in range(num_seqs - 1))]


def boundaries(lengths: Sequence[int], device: str) -> Tensor:
    """Return cumulative sequence lengths from 0 on, int32, ``(len(lengths) + 1,)``."""
    sums = torch.tensor([0, *lengths], device=device).cumsum(0)
    return sums.to(torch.int32)
