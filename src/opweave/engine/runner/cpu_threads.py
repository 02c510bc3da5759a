"""The number of CPU threads that torch's kernels use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let kernels use *count* threads until the end of the block, in this process; None: as before.

    Threads that have used torch already keep their own number, this one aside.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
