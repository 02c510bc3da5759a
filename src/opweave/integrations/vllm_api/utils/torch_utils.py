"""``direct_register_custom_op``: a function as a torch op that compilers do not look into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.library import Library

from opweave.base import compat, transaction

NAMESPACE = "vllm"  # code that registers an op calls torch.ops.vllm.<op>
_EVERY_DEVICE = "CompositeExplicitAutograd"

_libraries: list[Library] = []  # torch forgets the ops of a library that nobody has


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Iterable[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Register *op_func* as ``torch.ops.vllm.<op_name>``, with the schema of its annotations.

    A plugin that fails takes it back, unless it is of a library of the plugin's own.

    Args:
        op_name: the op's name.
        op_func: what the op runs.
        mutates_args: the arguments that it writes into.
        fake_impl: returns tensors with the metadata of the results; by default *op_func* does.
        target_lib: the library to define the op in, whose namespace it has then.
        dispatch_key: torch's key for *op_func*; by default it runs on every device.
        tags: torch's tags for the op.

    Raises:
        ValueError: a schema cannot be inferred from the annotations.
        RuntimeError: the namespace has an op of that name.
    """
    # Torch declares no types for define and impl.
    library: Any = target_lib or compat.new_library(NAMESPACE)
    schema = torch.library.infer_schema(op_func, mutates_args=tuple(mutates_args or ()))
    library.define(op_name + schema, tags=tags)
    library.impl(op_name, op_func, dispatch_key or _EVERY_DEVICE)
    if fake_impl is not None:
        compat.register_fake(library, op_name, fake_impl)
    if target_lib is None:
        _libraries.append(library)
        transaction.enter(f"torch op {NAMESPACE}::{op_name}", lambda: _remove(library))


def _remove(library: Library) -> None:
    _libraries.remove(library)
    compat.remove_ops(library)
