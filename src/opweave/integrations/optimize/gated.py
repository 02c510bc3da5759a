"""Gated MLPs: ``down(activation(gate(x)) * up(x))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.integrations.optimize.replaced import Replacement, register

# The children that hold the two products and the last one, by the names that models give them.
_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_PACKED = (("gate_up_proj", "down_proj"),)
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation", "hidden_act")

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": nn.functional.silu,
    "gelu_and_mul": nn.functional.gelu,
    "gelu_tanh_and_mul": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def _gated(gate: str, x: Tensor) -> Any:
    if gate == "silu_and_mul":
        return ir.ops.silu_and_mul(x)
    return ir.ops.gelu_and_mul(x, "tanh" if "tanh" in gate else "none")


def _separate(gate: str) -> Replacement:
    op = gate.replace("_tanh", "")

    @register(f"separate_{gate}", op)
    def forward(self: Any, x: Any = None, *others: Any, **named: Any) -> Any:
        if named or others or not isinstance(x, Tensor):
            return None
        first, second, last = (getattr(self, name) for name in _children(self, _SEPARATE))
        joined = torch.cat([first(x), second(x)], -1)
        return last(_gated(gate, joined))

    return forward


def _packed(gate: str) -> Replacement:
    op = gate.replace("_tanh", "")

    @register(f"packed_{gate}", op)
    def forward(self: Any, x: Any = None, *others: Any, **named: Any) -> Any:
        if named or others or not isinstance(x, Tensor):
            return None
        both, last = (getattr(self, name) for name in _children(self, _PACKED))
        return last(_gated(gate, both(x)))

    return forward


_REPLACEMENTS = {
    _SEPARATE: {gate: _separate(gate) for gate in _GATES},
    _PACKED: {gate: _packed(gate) for gate in _GATES},
}


def _children(module: nn.Module, kinds: Any) -> tuple[str, ...]:
    """Return the first of *kinds* whose names are linear children of *module*."""
    for names in kinds:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return tuple(names)
    return ()


def candidates(module: nn.Module) -> tuple[list[Replacement], int]:
    """Return what to try, and the width of the input; none for other modules."""
    for kinds, replacements in _REPLACEMENTS.items():
        names = _children(module, kinds)
        if names and (gate := _gate_of(module)):
            return [replacements[gate]], getattr(module, names[0]).in_features
    return [], 0


def _gate_of(module: nn.Module) -> str:
    """Return the gate whose activation computes what the module's does; "" if none does."""
    for name in _ACTIVATIONS:
        activation: Any = getattr(module, name, None)
        if not callable(activation):
            continue
        x = torch.linspace(-8, 8, 257, dtype=torch.float64)
        for gate, function in _GATES.items():
            try:
                if torch.allclose(activation(x), function(x), rtol=1e-9, atol=1e-9):
                    return gate
            except Exception:
                return ""
    return ""
