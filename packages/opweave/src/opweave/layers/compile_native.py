"""``forward_native`` of one op, compiled on its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave import platforms
from opweave.base import compat
from opweave.layers.errors import InvalidLayerError
from opweave.layers.registry import full_name

if TYPE_CHECKING:
    from opweave.layers.custom_op import CustomOp

Dims = Mapping[str, int | list[int]]


def compiled_native(op: CustomOp, dims: Dims | None) -> Callable[..., Any]:
    """Return ``op.forward_native``, compiled at its first call.

    The method is compiled once for all instances and bound to this one, so that a copy of the
    instance runs with its own parameters.

    Raises:
        InvalidLayerError: *dims* names a parameter that ``forward_native`` does not have.
    """
    cls = type(op)
    backend = platforms.current_platform.simple_compile_backend
    return MethodType(_compiled(cls.forward_native, backend, _frozen(cls, dims)), op)


@cache
def _compiled(
    native: Callable[..., Any], backend: str, dims: tuple[tuple[str, tuple[int, ...]], ...]
) -> Callable[..., Any]:
    compiled = torch.compile(native, backend=backend, dynamic=not dims)
    signature = inspect.signature(native)

    @wraps(native)
    def run(self: CustomOp, *args: Any, **kwargs: Any) -> Any:
        # Part of a larger graph, whose sizes count. Dynamo of torch 2.11 loses what a compiled
        # method is bound to.
        if torch.compiler.is_compiling():
            return native(self, *args, **kwargs)
        if dims:
            arguments = signature.bind(self, *args, **kwargs).arguments
            for name, numbers in dims:
                _mark(arguments.get(name), numbers)
        return compiled(self, *args, **kwargs)

    return run


def _mark(value: object, numbers: tuple[int, ...]) -> None:
    if isinstance(value, Tensor):  # an optional argument may be None
        for number in numbers:
            compat.mark_dynamic(value, number % value.dim())


def _frozen(cls: type[CustomOp], dims: Dims | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    parameters = inspect.signature(cls.forward_native).parameters
    for name in dims or {}:
        if name not in parameters:
            raise InvalidLayerError(
                f"dynamic_arg_dims of {full_name(cls)} names {name!r}, which forward_native does "
                f"not take. It takes {', '.join(list(parameters)[1:]) or 'nothing'}."
            )
    return tuple(
        (name, (given,) if isinstance(given, int) else tuple(given))
        for name, given in (dims or {}).items()
    )
