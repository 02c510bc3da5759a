"""Implementations that are one node of a graph, because tracers do not look into them."""

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

_libraries: list[Library] = []  # torch forgets the ops of a library that nobody has


def opaque(op: IrOp, namespace: str) -> Callable[[Function], Function]:
    """Make the decorated implementation of *op* a torch op of that *namespace*.

    Where gradients are needed tracers do look into it: autograd records what it calls.
    """

    def wrap(function: Function) -> Function:
        library = _new_library(namespace, op.name)
        torch_op = opaque_op(namespace, op.name, function, op.fake, op.schema.torch, library)
        arguments = op.schema.call()
        # Without __name__: Dynamo looks globals up in the module that __name__ claims.
        names = {**op.schema.defaults, "_op": torch_op}
        wrapped: Function = eval(f"lambda {op.schema.declaration}: _op({arguments})", names)
        wrapped.__module__ = function.__module__
        wrapped.__wrapped__ = function  # type: ignore[attr-defined]
        return wrapped

    return wrap


def mutating(namespace: str, schema: str) -> Callable[[Function], Function]:
    """Make the decorated function, which writes into arguments and returns None, a torch op."""
    name = schema.partition("(")[0]

    def wrap(function: Function) -> Function:
        library: Any = _new_library(namespace, name)  # torch declares no types for define and impl
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        compat.register_fake(library, name, lambda *arguments: None)
        return cast(Function, getattr(getattr(torch.ops, namespace), name).default)

    return wrap


def _new_library(namespace: str, name: str) -> Library:
    library = compat.new_library(namespace)
    _libraries.append(library)
    # Whatever interrupts the import of the kernels, the next one defines the op again.
    transaction.enter(f"torch op {namespace}::{name}", partial(compat.remove_ops, library))
    return library
