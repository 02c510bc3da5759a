"""The activations of MLPs by their names in configurations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.layers import get_act_and_mul_fn, get_act_fn
from opweave_engine.models.fields import Fields

# With a kernel of their own for ``activation(gate) * up``.
_GATED = ("gelu", "gelu_pytorch_tanh", "silu", "swish")
ACTIVATIONS = (
    *_GATED, "gelu_fast", "gelu_new", "quick_gelu", "relu", "relu2", "sigmoid", "tanh",
)  # fmt: skip
# Names of the experts' activations.
_OF_EXPERTS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}


class ActivationAndMul(nn.Module):
    """``activation(gate) * up`` of ``[gate | up]``.

    Args:
        activation: an elementwise activation.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.chunk(x, 2, -1)
        activated: Tensor = self.activation(gate)
        return activated * up


def gated_activation(name: str) -> nn.Module:
    """Return a new module for ``activation(gate) * up``; *name* is one of ``ACTIVATIONS``."""
    return get_act_and_mul_fn(name) if name in _GATED else ActivationAndMul(get_act_fn(name))


def read_activation(fields: Fields, key: str = "hidden_act", default: str = "silu") -> str:
    """Return the activation of an MLP.

    Raises:
        UnsupportedModelError: it is not supported.
    """
    return fields.require(key, fields.text(key, default), *ACTIVATIONS)


def read_expert_activation(fields: Fields) -> str:
    """Return the activation of experts; errors as those of :func:`read_activation`."""
    key = "hidden_act"
    return fields.require(key, fields.text(key, "silu"), *_OF_EXPERTS)


def expert_activation(name: str) -> str:
    """Return the name of an activation for :class:`~opweave.layers.FusedMoE`."""
    return _OF_EXPERTS[name]
