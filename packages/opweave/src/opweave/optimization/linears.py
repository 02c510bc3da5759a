"""Linear layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from opweave import ir
from opweave.optimization.replaced import Replacement, is_covered, register


@register("linear", "linear")
def linear(self: Any, input: Any = None, *others: Any, **named: Any) -> Any:
    weight = self.weight
    if named or others or not is_covered(input) or not is_covered(weight):
        return None
    return ir.ops.linear(input, weight, self.bias) if input.dtype == weight.dtype else None


def candidates(module: nn.Module) -> tuple[list[Replacement], int]:
    """Return the replacements to try, and the width of the input; none for other modules.

    A subclass of ``nn.Linear`` may compute more, so it must have the same ``forward``.
    """
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return ([linear], module.in_features) if is_linear else ([], 0)  # type: ignore[return-value]
