"""The doors to one op of the native module, for implementations that pick them themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opweave import native

STATUS = native.status()


def direct(name: str) -> Callable[..., Any]:
    """Return op *name*'s cheapest door that is open in eager mode."""
    if STATUS.fast_door:
        function: Callable[..., Any] = getattr(native.module(), name, _unavailable)
        return function
    return dispatched(name)


def dispatched(name: str) -> Callable[..., Any]:
    """Return op *name* in torch's dispatcher."""
    if not STATUS.available:
        return _unavailable
    op: Callable[..., Any] = getattr(torch.ops.opweave_c, name).default
    return op


def _unavailable(*arguments: object) -> None:
    raise RuntimeError(f"The native ops are not available: {STATUS.reason_missing}.")
