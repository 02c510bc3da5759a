"""Register implementations as opaque torch ops, which tracers record as one node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.library import Library

from opweave.base import compat, transaction
from opweave.ir import IrOp
from opweave.ir.opaque import opaque_op

Function = Callable[..., Any]

_libraries: list[Library] = []  # torch removes the ops of a library when it is garbage collected


def opaque(op: IrOp, namespace: str, name: str = "") -> Callable[[Function], Function]:
    """Register the decorated implementation of *op* as a torch op in *namespace*.

    If gradients are required, autograd records the operators inside it instead. Eager calls that
    nothing has to see call the function without the torch op around it.

    Args:
        name: the name of the torch op; by default that of *op*.
    """

    def wrap(function: Function) -> Function:
        library = _new_library(namespace, name or op.name)
        torch_op = opaque_op(
            namespace, name or op.name, function, op.fake, op.schema.torch, library
        )
        arguments = op.schema.call()
        # No __name__ in the globals, because Dynamo would look them up in the module of that name.
        names = {**op.schema.defaults, "_op": torch_op}
        wrapped: Function = eval(f"lambda {op.schema.declaration}: _op({arguments})", names)
        wrapped.__module__ = function.__module__
        wrapped.__wrapped__ = function  # type: ignore[attr-defined]
        return undispatched(function)(wrapped)

    return wrap


def undispatched(plain: Function) -> Callable[[Function], Function]:
    """Let plain calls of the decorated implementation run *plain* instead.

    Args:
        plain: computes the same without the torch ops of the implementation, which tracers, modes
            and autograd see.
    """

    def decorate(function: Function) -> Function:
        function.undispatched = plain  # type: ignore[attr-defined]
        return function

    return decorate


def mutating(namespace: str, schema: str) -> Callable[[Function], Function]:
    """Register the decorated function as a torch op that writes to arguments and returns None.

    Args:
        namespace: the namespace of the torch op.
        schema: the schema of the torch op, including its name.
    """
    name = schema.partition("(")[0]

    def wrap(function: Function) -> Function:
        library: Any = _new_library(namespace, name)  # define and impl are untyped in torch
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        compat.register_fake(library, name, lambda *arguments: None)
        return cast(Function, getattr(getattr(torch.ops, namespace), name).default)

    return wrap


def _new_library(namespace: str, name: str) -> Library:
    library = compat.new_library(namespace)
    _libraries.append(library)
    # If the import of the kernels fails, the next import must be able to define the op again.
    transaction.enter(f"torch op {namespace}::{name}", partial(compat.remove_ops, library))
    return library
