"""Arguments as torch's kernels for CUDA want them."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 16
"""What a thread loads at a time."""


def aligned(t: Tensor) -> Tensor:
    """Return *t*, or a copy, so that each row begins where a GPU can load 16 bytes at a time.

    Attention on CUDA does not look at that, and is wrong where it does not hold; ``rms_norm`` takes
    another way, on which one infinity makes all of its row NaN.
    """
    if not t.is_cuda:
        return t
    count = _BYTES // t.itemsize
    places = (t.storage_offset(), *t.stride()[:-1])
    return t.clone(memory_format=torch.contiguous_format) if any(p % count for p in places) else t
