"""Checks of arguments that several ops share."""

import torch
from torch import Tensor

from opweave.base import plain_call
from opweave.ir.rule import plain


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read at no cost: a plain CPU tensor in eager mode."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in plain_call.PLAIN_TYPES
        and tensor.is_cpu
        and not plain_call.hides_values()
    )


def check_shape(op: str, name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError unless *tensor* has *shape*; -1 stands for any size."""
    fits = tensor.ndim == len(shape) and all(
        wanted in (-1, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise misfit(op, name, tensor, f"({sizes}{',' * (len(shape) == 1)})")


def misfit(op: str, name: str, tensor: Tensor, wanted: str) -> ValueError:
    """Return the error for an argument *name* of *op* that must be *wanted*."""
    found = f"{plain(tensor.dtype)}, {tuple(tensor.shape)}"
    return ValueError(f"{op}: {name} must be {wanted}; found {found}.")
