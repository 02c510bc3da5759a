"""Activations between the two products of an expert, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class ExpertActivation:
    """One activation.

    Attributes:
        function: maps the result of the first product, with *options* as keyword arguments.
        gated: whether its input has twice as many elements as its output.
        options: the names and defaults of its constants; a limit of None means no limit.
    """

    function: Function
    gated: bool = True
    options: Mapping[str, float | None] = field(default_factory=dict)


def _times_up(act: Callable[[Tensor], Tensor]) -> Function:
    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return act(gate) * up

    return apply


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _clamped(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * (gate * torch.sigmoid(gate * alpha))


def _swigluoai(x: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    return _clamped(x[..., 0::2], x[..., 1::2], alpha, beta, limit)


def _swigluoai_uninterleave(x: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _clamped(gate, up, alpha, beta, limit)


def _swiglustep(x: Tensor, limit: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _situ(x: Tensor, beta: float, limit: float | None) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    if limit is not None:
        up = limit * torch.tanh(up / limit)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype)


_OAI = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}

EXPERT_ACTIVATIONS: Mapping[str, ExpertActivation] = {
    "silu": ExpertActivation(_times_up(functional.silu)),
    "gelu": ExpertActivation(_times_up(functional.gelu)),
    "gelu_tanh": ExpertActivation(_times_up(_gelu_tanh)),
    "relu2": ExpertActivation(_times_up(_relu2)),
    "swigluoai": ExpertActivation(_swigluoai, options=_OAI),
    "swigluoai_uninterleave": ExpertActivation(_swigluoai_uninterleave, options=_OAI),
    "swiglustep": ExpertActivation(_swiglustep, options={"limit": 7.0}),
    "situ": ExpertActivation(_situ, options={"beta": 1.0, "limit": None}),
    "silu_no_mul": ExpertActivation(functional.silu, gated=False),
    "gelu_no_mul": ExpertActivation(functional.gelu, gated=False),
    "gelu_tanh_no_mul": ExpertActivation(_gelu_tanh, gated=False),
    "relu2_no_mul": ExpertActivation(_relu2, gated=False),
}


def expert_activation(name: str) -> ExpertActivation:
    """Return the activation called *name*; raise ValueError if it does not exist."""
    if name not in EXPERT_ACTIVATIONS:
        raise ValueError(
            f"unknown expert activation {name!r}; available: {', '.join(EXPERT_ACTIVATIONS)}."
        )
    return EXPERT_ACTIVATIONS[name]


def bound_activation(
    name: str, alpha: float | None, beta: float | None, limit: float | None
) -> Callable[[Tensor], Tensor]:
    """Return the activation called *name* as a function of one tensor.

    Args:
        name: the activation.
        alpha, beta, limit: its constants; None for the default.

    Raises:
        ValueError: the activation does not exist, or does not have a given constant.
    """
    activation = expert_activation(name)
    given = {"alpha": alpha, "beta": beta, "limit": limit}
    chosen = {key: value for key, value in given.items() if value is not None}
    for key in sorted(chosen.keys() - activation.options.keys()):
        having = [n for n, a in EXPERT_ACTIVATIONS.items() if key in a.options]
        raise ValueError(
            f"the activation {name!r} has no {key}, found {key}={chosen[key]}. Activations that "
            f"have it: {', '.join(having)}."
        )
    options = {**activation.options, **chosen}
    return lambda x: activation.function(x, **options)
