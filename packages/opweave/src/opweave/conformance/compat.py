"""The private parts of torch that the kit touches, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return the backend of ``torch.compile`` called *name*."""
    from torch._dynamo import lookup_backend  # which takes longer to import than all of opweave

    return lookup_backend(name)


def maybe_mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let ``torch.compile`` take any size of *dim*, if nothing it traces needs this one."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dim)


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
    return _described(value, mode) if isinstance(value, Tensor) else value


def _described(t: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return what ``mode.from_tensor`` makes of a plain tensor, several times quicker."""
    with mode:
        if not t.storage_offset():
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        behind = t.untyped_storage().nbytes() // t.element_size()
        return torch.empty(behind, dtype=t.dtype, device=t.device).as_strided(
            t.shape, t.stride(), t.storage_offset()
        )


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of two int8 tensors, in int32."""
    product: Tensor = torch.ops.aten._int_mm(a, b)
    return product
