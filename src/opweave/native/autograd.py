"""Native ops where autograd watches: it has no derivative of them, and loses none unseen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def autograd_watches() -> bool:
    """Whether grad mode is on, or forward-mode differentiation is going on."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def call_watched(op: torch._ops.OpOverload, *arguments: Any) -> Any:
    """Call *op* through torch's dispatcher, and count a new version of each tensor it writes.

    So that a backward pass which needs the values from before notices, as with torch's own ops.

    Raises:
        RuntimeError: a tensor that is written requires grad, or one has a tangent.
    """
    name = op._schema.name.partition("::")[2]
    tensors = {
        argument.name: (given, argument.is_write)
        for argument, given in zip(op._schema.arguments, arguments, strict=False)
        if isinstance(given, Tensor)
    }
    for argument, (tensor, is_written) in tensors.items():
        if is_written and tensor.requires_grad:
            raise RuntimeError(
                f"{name}: {argument} is written and requires grad, of which the op has no "
                f"derivative; call it under torch.no_grad(), or with {argument}.detach()"
            )
        if _has_tangent(tensor):
            raise RuntimeError(
                f"{name}: {argument} has a tangent, of which the op has no derivative; call it on "
                "tensors without one"
            )
    result = op(*arguments)
    for tensor, is_written in tensors.values():
        if is_written and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return result


def _has_tangent(tensor: Tensor) -> bool:
    if forward_ad._current_level < 0:
        return False
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None
