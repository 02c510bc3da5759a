"""Division of sizes and tensors over ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["divide", "ensure_divisibility", "is_weak_contiguous", "split_tensor_along_last_dim"]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless *denominator* divides *numerator*."""
    if numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the exact quotient; raise AssertionError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Return equal parts of the last dimension."""
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def is_weak_contiguous(inp: Tensor) -> bool:
    """Return whether the elements fill one part of the storage without gaps, in any order."""
    rest = inp.untyped_storage().nbytes() - inp.storage_offset() * inp.element_size()
    return inp.is_contiguous() or rest == inp.numel() * inp.element_size()
