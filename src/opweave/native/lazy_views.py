"""Views whose memory does not hold their values: negated and conjugated ones."""

from __future__ import annotations

from torch import Tensor

from opweave.base import compat
from opweave.native.arguments import arguments_of, name_of


def check_none_written(op: compat.OpOverload, *arguments: object) -> None:
    """Check that *op* writes into no such view: torch would resolve it, and lose what is written.

    Raises:
        RuntimeError: it does.
    """
    for (name, is_written), given in zip(arguments_of(op), arguments, strict=False):
        if is_written and isinstance(given, Tensor) and (given.is_neg() or given.is_conj()):
            kind = "negated" if given.is_neg() else "conjugated"
            raise RuntimeError(
                f"{name_of(op)}: {name} is written and is a {kind} view; write into another "
                "tensor, and copy_() that into the view"
            )
