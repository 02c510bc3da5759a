"""Memory alignment of arguments for torch's CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 16  # per vectorized load


def aligned(t: Tensor) -> Tensor:
    """Return *t*, or a copy if it is on CUDA and a row is not aligned to 16 bytes.

    torch's attention does not check the alignment, and returns wrong results without it.
    ``rms_norm`` falls back to a kernel that turns a row with an infinity into NaN.
    """
    if not t.is_cuda:
        return t
    count = _BYTES // t.itemsize
    places = (t.storage_offset(), *t.stride()[:-1])
    return t.clone(memory_format=torch.contiguous_format) if any(p % count for p in places) else t
