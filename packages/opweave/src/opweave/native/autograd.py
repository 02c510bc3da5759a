"""Calls of native ops with autograd: they have no derivatives, so a lost gradient is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opweave.base import compat
from opweave.native import lazy_views
from opweave.native.arguments import arguments_of, name_of


def call_watched(op: compat.OpOverload, *arguments: Any) -> Any:
    """Call *op* through the dispatcher, and increment the version of each tensor that it mutates.

    A backward pass that needs the old values then raises, as for torch's own ops.

    Raises:
        RuntimeError: the op mutates a negated view, or mutates floating-point tensors in grad mode
            while a tensor requires grad; or a tensor has a tangent.
    """
    tensors = {
        argument: (given, is_written)
        for (argument, is_written), given in zip(arguments_of(op), arguments, strict=False)
        if isinstance(given, Tensor)
    }
    with compat.no_torch_function():  # internal calls must not reach the user's modes
        lazy_views.check_none_written(op, *arguments)
        _check_derivatives(name_of(op), tensors)
        written = [t for t, is_written in tensors.values() if is_written and not t.is_inference()]
    result = op(*arguments)
    for tensor in written:
        torch.autograd.graph.increment_version(tensor)
    return result


def _check_derivatives(op: str, tensors: Mapping[str, tuple[Tensor, bool]]) -> None:
    writes_numbers = any(written and t.is_floating_point() for t, written in tensors.values())
    for argument, (tensor, _) in tensors.items():
        if tensor.requires_grad and writes_numbers and torch.is_grad_enabled():
            raise RuntimeError(_refusal(op, argument))
        if compat.has_tangent(tensor):
            raise RuntimeError(
                f"{op}: {argument} has a tangent, but the op does not support forward-mode AD; "
                "call it on tensors without tangents"
            )


def call_unwatched(op: compat.OpOverload, *arguments: Any) -> Any:
    """Call *op* through the dispatcher without autograd.

    Raises:
        RuntimeError: the op mutates a negated view.
    """
    with compat.no_torch_function():
        lazy_views.check_none_written(op, *arguments)
    return op(*arguments)


def call_traced(op: compat.OpOverload, *arguments: Any) -> Any:
    """Like `call_watched`, as far as Dynamo can trace it.

    Raises:
        RuntimeError: the op mutates floating-point tensors in grad mode while a tensor requires
            grad.
    """
    if not torch.is_grad_enabled():
        return op(*arguments)
    named = list(zip(arguments_of(op), arguments, strict=False))
    written = [given for (_, is_written), given in named if is_written]
    if any(t is not None and t.is_floating_point() for t in written):
        for (argument, _), given in named:
            if isinstance(given, Tensor) and given.requires_grad:
                raise RuntimeError(_refusal(name_of(op), argument))
    result = op(*arguments)
    for tensor in written:
        if tensor is not None:
            torch.autograd.graph.increment_version(tensor)
    return result


def _refusal(op: str, argument: str) -> str:
    return (
        f"{op}: {argument} requires grad, but the op is not differentiable; call it under "
        "torch.no_grad(), or with detached tensors (Tensor.detach)"
    )
