"""Lazily negated and conjugated views, whose memory does not hold their values."""

from __future__ import annotations

from torch import Tensor

from opweave.base import compat
from opweave.native.arguments import arguments_of, name_of


def check_none_written(op: compat.OpOverload, *arguments: object) -> None:
    """Raise RuntimeError if *op* mutates such a view, which torch would replace by a copy."""
    for (name, is_written), given in zip(arguments_of(op), arguments, strict=False):
        if is_written and isinstance(given, Tensor) and (given.is_neg() or given.is_conj()):
            kind = "negated" if given.is_neg() else "conjugated"
            raise RuntimeError(
                f"{name_of(op)}: {name} is mutated, but is a lazily {kind} view; write to another "
                "tensor, and copy_() it into the view"
            )
