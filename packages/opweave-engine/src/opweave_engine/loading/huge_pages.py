"""CPU memory in huge pages.

A decoding step reads all weights once. In pages of 4 KiB it waits for the translation of addresses
as well: a core of a Zen 4 reads 18 to 21 GB/s from such pages, and 30 to 34 from pages of 2 MiB.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_HUGE = 2 << 20  # bytes


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that is not filled, in huge pages where that is possible and of use.

    It is on the CPU of a Linux system, from 2 MiB on. The system gives huge pages if
    ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always``, and there are
    some left; else ordinary ones. It begins where a page of 2 MiB does, by which kernels know it.
    """
    size = math.prod(shape) * dtype.itemsize
    if not _gains(size, device):
        return torch.empty(*shape, dtype=dtype, device=device)
    # Not torch's allocator: it writes before the tensor, which makes a small page there.
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % _HUGE
    return data[start : start + size].view(dtype).view(*shape)


def move_parameters(module: nn.Module) -> None:
    """Move large parameters of *module* on the CPU to huge pages; their values are lost."""
    for parameter in module.parameters():
        if _gains(parameter.nbytes, parameter.device):
            parameter.data = empty(parameter.shape, parameter.dtype, parameter.device)


def _gains(size: int, device: torch.device) -> bool:
    return device.type == "cpu" and size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE")
