"""The private parts of torch that the kit touches, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend, maybe_mark_dynamic
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fake_values", "faked", "lookup_backend", "maybe_mark_dynamic"]


def fake_values(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments as fake tensors: shapes, strides and dtypes, no numbers."""
    mode = FakeTensorMode()
    return tuple(_fake(value, mode) for value in values)


def faked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call *function* with fake tensors, inside their mode."""
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        return function(
            *(_fake(value, mode) for value in args),
            **{name: _fake(value, mode) for name, value in kwargs.items()},
        )


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(item, mode) for item in value)
    return mode.from_tensor(value) if isinstance(value, Tensor) else value
