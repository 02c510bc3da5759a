"""Activations by their names in model configurations."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from opweave.ir.errors import did_you_mean
from opweave.layers.activation import GeluAndMul, SiluAndMul, SwigluOAIAndMul
from opweave.layers.errors import LayerArgumentError
from opweave.layers.pointwise import XIELU, FastGELU, NewGELU, QuickGELU, ReLUSquaredActivation

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_fast": FastGELU,
    "gelu_new": NewGELU,
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "relu2": ReLUSquaredActivation,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "xielu": XIELU,
}
_GATED: dict[str, Callable[[], nn.Module]] = {
    "geglu": GeluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
    "silu": SiluAndMul,
    "swigluoai": SwigluOAIAndMul,
    "swish": SiluAndMul,
}


def get_act_fn(name: str) -> nn.Module:
    """Return a new elementwise activation.

    Args:
        name: as in a configuration's ``hidden_act``, in upper or lower case. The prefix
            ``torch.nn.modules.``, which sentence-transformers writes, is ignored.

    Raises:
        LayerArgumentError: (a ValueError) no activation has that name.

    >>> get_act_fn("gelu_pytorch_tanh")
    GELU(approximate='tanh')
    """
    return _named(name, _ACTIVATIONS, "activation")


def get_act_and_mul_fn(name: str) -> nn.Module:
    """Return a new gated activation, ``(..., 2 * d)`` to ``(..., d)``.

    Raises:
        LayerArgumentError: (a ValueError) no gated activation has that name.

    >>> get_act_and_mul_fn("silu")
    SiluAndMul()
    """
    return _named(name, _GATED, "gated activation")


def _named(name: str, known: dict[str, Callable[[], nn.Module]], kind: str) -> nn.Module:
    plain = name.lower()
    if plain.startswith("torch.nn.modules."):
        plain = plain.rpartition(".")[2]
    if plain not in known:
        raise LayerArgumentError(f"unknown {kind} {name!r}. {did_you_mean(plain, known)}")
    return known[plain]()
