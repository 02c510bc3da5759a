"""Linear layers, and gated MLPs whose gate and up projections are one linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.optimization.forward import Replacement, is_covered, register


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


# Gated MLPs. Two separate projections are not replaced: joining their results costs more memory
# traffic than the op saves.


_GATE_AND_UP, _DOWN = "gate_up_proj", "down_proj"
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation", "hidden_act")

_ACTIVATION_ATTRIBUTE, _APPROXIMATION_ATTRIBUTE = "_opweave_activation", "_opweave_activation_form"

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": nn.functional.silu,
    "gelu_and_mul": nn.functional.gelu,
    "gelu_tanh_and_mul": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def _gated(gate: str, x: Tensor) -> Any:
    if gate == "silu_and_mul":
        return ir.ops.silu_and_mul(x)
    return ir.ops.gelu_and_mul(x, "tanh" if "tanh" in gate else "none")


def _kept(module: nn.Module) -> dict[str, Any]:
    activation = _activation_of(module)
    return {_ACTIVATION_ATTRIBUTE: activation, _APPROXIMATION_ATTRIBUTE: _form_of(activation)}


def _form_of(activation: Any) -> Any:
    """Return the setting of ``nn.GELU``, the only one of the supported activations."""
    return getattr(activation, "approximate", None)


def _packed(gate: str) -> Replacement:
    op = gate.replace("_tanh", "")

    @register(f"packed_{gate}", op, kept=_kept, settings=_ACTIVATIONS)
    def forward(self: Any, x: Any = None, *others: Any, **named: Any) -> Any:
        if named or others or not is_covered(x) or not _is_unchanged(self):
            return None
        return self.down_proj(_gated(gate, self.gate_up_proj(x)))

    return forward


_REPLACEMENTS = {gate: _packed(gate) for gate in _GATES}


def gated_candidates(module: nn.Module) -> tuple[list[Replacement], int]:
    """Return the replacements to try, and the width of the input; none for other modules."""
    both, last = (getattr(module, name, None) for name in (_GATE_AND_UP, _DOWN))
    if not isinstance(both, nn.Linear) or not isinstance(last, nn.Linear) or not _is_plain(module):
        return [], 0
    gate = _gate_of(module)
    return ([_REPLACEMENTS[gate]], both.in_features) if gate else ([], 0)


def _activation_of(module: nn.Module) -> Any:
    """Return the first attribute that may be the activation, or None."""
    candidates = (getattr(module, name, None) for name in _ACTIVATIONS)
    return next((candidate for candidate in candidates if callable(candidate)), None)


def _is_unchanged(module: Any) -> bool:
    """Whether *module* still has its activation of :func:`_kept`, and nothing else that acts.

    Dropout acts in training mode; hooks of the activation and of dropout must run.
    """
    activation = _activation_of(module)
    if activation is not getattr(module, _ACTIVATION_ATTRIBUTE, None):
        return False
    if _form_of(activation) != getattr(module, _APPROXIMATION_ATTRIBUTE, None):
        return False
    for name, child in module.named_children():
        if name in (_GATE_AND_UP, _DOWN):
            continue
        if child._forward_hooks or child._forward_pre_hooks:
            return False
        is_inactive = type(child) is nn.Dropout and not (child.training and child.p)
        if child is not activation and not is_inactive:
            return False
    return True


def _is_plain(module: nn.Module) -> bool:
    """Whether *module* has two linear layers, an activation without state, and maybe dropout."""
    activation = _activation_of(module)
    is_stateless = not isinstance(activation, nn.Module) or not [*activation.state_dict()]
    others = [child for name, child in module.named_children() if name not in (_GATE_AND_UP, _DOWN)]
    return (
        is_stateless
        and not module._parameters
        and all(child is activation or type(child) is nn.Dropout for child in others)
    )


def _gate_of(module: nn.Module) -> str:
    """Return the gate with the module's activation, or ""."""
    activation = _activation_of(module)
    if activation is None:
        return ""
    x = torch.linspace(-8, 8, 257, dtype=torch.float64)
    try:
        y = activation(x)
    except Exception:  # not a function of one tensor
        return ""
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        return ""
    for gate, function in _GATES.items():
        if torch.allclose(y, function(x), rtol=1e-9, atol=1e-9):
            return gate
    return ""
