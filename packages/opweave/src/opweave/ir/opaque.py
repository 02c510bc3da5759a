"""Opaque functions: one graph node each, which tracers do not trace into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from opweave.base import compat
from opweave.ir.selection import needs_gradient

Function = Callable[..., Any]

_libraries: list[Library] = []  # torch removes the ops of a library that is garbage-collected


def opaque_op(
    namespace: str,
    name: str,
    function: Function,
    fake: Function,
    schema: str | None = None,
    library: Library | None = None,
) -> Function:
    """Define a torch op that calls *function* with no overhead besides the dispatcher's.

    If a gradient is needed, autograd records the operations inside *function*.

    Args:
        namespace, name: the name of the op, ``torch.ops.<namespace>.<name>``.
        function: the implementation. Must not mutate its arguments or return views of them.
        fake: returns tensors with the metadata of the results.
        schema: the schema from the parenthesis on; inferred from *function* by default.
        library: owner of the op; by default a new library that lives as long as the process.
    """
    if library is None:
        _libraries.append(library := compat.new_library(namespace))
    untyped: Any = library  # torch declares no types for define and impl
    untyped.define(name + (schema or torch.library.infer_schema(function, mutates_args=())))
    torch_op: Function = getattr(getattr(torch.ops, namespace), name).default

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if needs_gradient((*args, *kwargs.values())):
            return function(*args, **kwargs)
        with compat.below_autograd():
            return torch_op(*args, **kwargs)

    untyped.impl(name, function, "CompositeExplicitAutograd")
    untyped.impl(name, autograd, "Autograd")
    compat.register_fake(untyped, name, fake)
    return torch_op
