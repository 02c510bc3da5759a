"""Argument rules shared by several providers."""

from __future__ import annotations

from functools import cache

import torch

from opweave.ir import rules
from opweave.ir.rule import Rule, TensorRule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NARROW_FLOATS = (torch.bfloat16, torch.float16)

_VECTOR = 16  # bytes that a GPU loads at once


def one_element(name: str) -> Rule:
    """Require that parameter *name* has one element, or is None if it is optional."""
    return TensorRule(
        (name,), "{t}.numel() == 1", lambda n, t: f"{n}: {t.numel()} elements (supports 1)"
    )


def row(weight: str, x: str = "x") -> Rule:
    """Require a contiguous vector *weight*, with an element for each column of *x*."""
    return (
        rules.not_none(weight)
        & rules.per_last_dim(weight, x)
        & rules.contiguous(weight)
        & rules.same_device(x, weight)
    )


def residual(name: str, x: str = "x") -> Rule:
    """Require a contiguous tensor *name* like *x*."""
    return (
        rules.same_shape(x, name)
        & rules.same_dtype(x, name)
        & rules.same_device(x, name)
        & rules.contiguous(name)
    )


def aligned(*names: str) -> Rule:
    """Require that tensors begin at a multiple of 16 bytes, which vectorized loads need."""
    return TensorRule(
        names,
        "{t}.storage_offset() * {t}.itemsize % {0} == 0",
        lambda n, t: (
            f"{n}: begins {t.storage_offset() * t.itemsize} bytes into its memory (supports "
            f"multiples of {_VECTOR})"
        ),
        (_VECTOR,),
    )


def nvidia(name: str, major: int, minor: int) -> Rule:
    """Require that *name* is on an NVIDIA GPU of at least this compute capability."""
    return rules.cuda(name) & TensorRule(
        (name,),
        "{0}({t}.device) >= {1}",
        lambda n, t: f"{n}: on {t.device} (needs NVIDIA compute capability {major}.{minor})",
        (_capability, (major, minor)),
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) for a GPU of AMD."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
