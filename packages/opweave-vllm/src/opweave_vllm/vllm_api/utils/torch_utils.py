"""``direct_register_custom_op``: register a function as an opaque torch op."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.library import Library

from opweave import torch_compat
from opweave.kernels.wrap import new_library

__all__ = ["direct_register_custom_op"]

NAMESPACE = "vllm"  # code that registers an op calls torch.ops.vllm.<op>
_EVERY_DEVICE = "CompositeExplicitAutograd"


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Iterable[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Register *op_func* as ``torch.ops.vllm.<op_name>``, with a schema from its annotations.

    If a plugin fails, its ops are removed, except those in a *target_lib*.

    Args:
        op_name: the name of the op.
        op_func: its implementation.
        mutates_args: the arguments that it mutates.
        fake_impl: returns tensors with the metadata of the results; *op_func* by default.
        target_lib: the library to define the op in, with its namespace.
        dispatch_key: torch's dispatch key for *op_func*; all devices by default.
        tags: torch's tags for the op.

    Raises:
        ValueError: a schema cannot be inferred from the annotations.
        RuntimeError: the namespace already has an op of that name.
    """
    # Torch does not annotate define and impl.
    schema = torch.library.infer_schema(op_func, mutates_args=tuple(mutates_args or ()))
    library: Any = target_lib or new_library(NAMESPACE, op_name)
    library.define(op_name + schema, tags=tags)
    library.impl(op_name, op_func, dispatch_key or _EVERY_DEVICE)
    if fake_impl is not None:
        torch_compat.register_fake(library, op_name, fake_impl)
