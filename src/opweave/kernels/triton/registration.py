"""Register implementations in Triton, and launch their kernels."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from opweave.adapters.opaque import opaque
from opweave.base.packages import is_installed
from opweave.ir import IrOp
from opweave.ir.predicate import Predicate
from opweave.ir.traits import BATCH_INVARIANT

Function = Callable[..., Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on CPU tensors."""

_interpreter = threading.Lock()  # the interpreter patches triton.language, so it is not thread-safe
_device_of: Callable[[Tensor], AbstractContextManager[None]] = torch.cuda.device_of
NAMESPACE = "opweave_triton"
_IS_THERE = is_installed("triton")


class Kernels:
    """The kernels of a ``jit`` module, which is imported on first access."""

    def __init__(self, module: str) -> None:
        self._module = f"{__package__}.jit.{module}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspection must not import Triton
            raise AttributeError(name)
        kernel = getattr(importlib.import_module(self._module), name)
        setattr(self, name, kernel)
        return kernel


def launch(
    kernel: Any, grid: tuple[int, ...], out: Tensor, *arguments: object, **constants: object
) -> None:
    """Launch *kernel* on *grid*, on the device of *out*, its first argument."""
    if 0 not in grid:
        with _interpreter if INTERPRETED else _device_of(out):
            kernel[grid](out, *arguments, **constants)


def block_of(size: int) -> int:
    """Return the smallest power of two that is at least *size*.

    >>> [block_of(size) for size in (1, 64, 65)]
    [1, 64, 128]
    """
    return 1 << max(size - 1, 0).bit_length()


def implements(
    op: IrOp,
    supports_args: Predicate,
    *,
    inplace: bool = False,
    traits: Iterable[str] = (BATCH_INVARIANT,),
) -> Callable[[Function], Function]:
    """Register the decorated function as the Triton implementation of *op*.

    The function becomes an opaque op, unless it is in-place. An in-place implementation must call
    its kernels through :func:`opweave.adapters.opaque.mutating`.
    """
    register = op.register_impl(
        "triton",
        supported=_IS_THERE,
        unsupported_reason=None if _IS_THERE else "Triton is not installed",
        supports_args=supports_args,
        inplace=inplace,
        traits=traits,
    )
    make_opaque = opaque(op, NAMESPACE)
    return register if inplace else lambda function: register(make_opaque(function))
