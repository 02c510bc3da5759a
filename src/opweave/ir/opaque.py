"""Functions that are one node of a graph, because tracers do not look into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from opweave.base import compat
from opweave.ir.selection import needs_gradient

Function = Callable[..., Any]

_libraries: list[Library] = []  # torch forgets the ops of a library that nobody has


def opaque_op(
    namespace: str,
    name: str,
    function: Function,
    fake: Function,
    schema: str | None = None,
    library: Library | None = None,
) -> Function:
    """Return a torch op that calls *function*, and adds no more to a call than the dispatcher.

    Where gradients are needed, autograd records what *function* calls.

    Args:
        namespace, name: of the op.
        function: changes none of its arguments, and returns no view of one.
        fake: returns tensors with the metadata of its results.
        schema: the op's, from the parenthesis on; by default that of the annotations of *function*.
        library: of the namespace, which keeps the op; by default one that is never given up.
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
