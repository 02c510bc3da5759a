"""Activations of experts."""

from enum import Enum
from typing import Any, Self

from torch import Tensor

from opweave.ir.ops.fused_experts import bound_activation, expert_activation

__all__ = ["MoEActivation", "apply_moe_activation"]

_NO_MUL = "_no_mul"
_ALIASES = {"gelu_pytorch_tanh": "gelu_tanh"}


class MoEActivation(Enum):
    """An activation of ``ir.ops.fused_experts``; the value is its name there."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SITU = "situ"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        """Whether the input has twice as many elements as the output."""
        return expert_activation(self.value).gated

    def without_mul(self) -> Self:
        """Return the activation without a gate, or this one if opweave does not have it."""
        name = self.value + _NO_MUL
        return next((activation for activation in type(self) if activation.value == name), self)

    @classmethod
    def from_str(cls, s: str) -> Self:
        """Return the activation called *s*; raise ValueError if it does not exist."""
        expert_activation(name := _ALIASES.get(s, s))
        return cls(name)


def apply_moe_activation(
    activation: MoEActivation, output: Tensor, input: Tensor, **constants: Any
) -> Tensor:
    """Write the activation of *input* to *output*, and return it.

    Args:
        activation: the activation.
        output: has half as many columns as *input* if the activation is gated.
        input: the result of the experts' first product.
        constants: ``alpha``, ``beta`` and ``limit``, where the activation has them.

    Raises:
        ValueError: the activation does not have one of the constants.
    """
    names = ("alpha", "beta", "limit")
    if unknown := constants.keys() - names:
        raise ValueError(f"unknown constants {sorted(unknown)}; accepted: {', '.join(names)}")
    values = {name: constants.get(name) for name in names}
    return output.copy_(bound_activation(activation.value, **values)(input))
