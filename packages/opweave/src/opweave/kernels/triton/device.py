"""The GPU that kernels are launched on: its limits, and how many programs keep it busy."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from opweave.kernels.triton.registration import INTERPRETED

MANY_BYTES = 128 * 1024
"""The shared memory that large tiles need, with two prefetched ones."""


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory per program, in bytes."""
    if INTERPRETED:
        return MANY_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # incompletely typed in torch
    usual = properties.shared_memory_per_block  # all there is on AMD GPUs
    return int(getattr(properties, "shared_memory_per_block_optin", usual))


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors or compute units."""
    if INTERPRETED:
        return 16  # so that kernels run with and without splits in tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_count(programs: int, wanted: int, most: int, where: torch.device) -> int:
    """Return by how many programs each of *programs* is replaced, a power of two.

    Args:
        programs: the number of programs without splits.
        wanted: the programs per multiprocessor that hide the latency of memory.
        most: the largest useful number of splits.
        where: the GPU.
    """
    splits = wanted * processors(where) // max(programs, 1)
    return 1 << max(min(splits, most), 1).bit_length() - 1
