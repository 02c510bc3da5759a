"""Normalization layers, recognized by their parameters and results.

RMS normalization has several forms: Llama rounds before the product with the weight, OLMo 2 after
it, and Gemma's weights are off by one. The first form with the results of the module is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.optimization.forward import Replacement, is_covered, register

_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")


def epsilon_of(module: nn.Module) -> float | None:
    """Return the epsilon attribute of a normalization layer."""
    for name in _EPSILONS:
        value: Any = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


# Attributes that ``forward`` may read: the epsilon, and those that are fixed with the parameters.
_SETTINGS = (*_EPSILONS, "normalized_shape", "elementwise_affine", "with_scale")
_UNWEIGHTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _covers(self: Any, x: Any, others: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether the arguments are one tensor, in the dtype and with the width of the weight."""
    weight: Any = getattr(self, "weight", None)
    return (
        is_covered(x)
        and not others
        and not named
        and is_covered(weight)
        and x.dtype == weight.dtype
        and x.shape[-1:] == weight.shape
        and epsilon_of(self) is not None
    )


def _rms_norm(name: str, weight_of: Callable[[Any], Tensor]) -> Replacement:
    @register(name, "rms_norm", settings=_SETTINGS)
    def forward(self: Any, x: Any = None, *others: Any, **named: Any) -> Any:
        if not _covers(self, x, others, named):
            return None
        return ir.ops.rms_norm(x, weight_of(self), epsilon_of(self))

    return forward


ROUNDED_FIRST = _rms_norm("rms_norm", lambda module: module.weight)
ROUNDED_LAST = _rms_norm("rms_norm_rounded_last", lambda module: module.weight.float())
OFF_BY_ONE = _rms_norm("rms_norm_off_by_one", lambda module: 1.0 + module.weight.float())


@register("rms_norm_unweighted", "rms_norm", settings=_SETTINGS)
def unweighted(self: Any, x: Any = None, *others: Any, **named: Any) -> Any:
    if others or named or not is_covered(x) or x.dtype not in _UNWEIGHTED_DTYPES:
        return None
    sizes, epsilon = getattr(self, "normalized_shape", None), epsilon_of(self)
    if epsilon is None or (sizes is not None and x.shape[-1:] != sizes):
        return None
    return ir.ops.rms_norm(x, None, epsilon)


@register("layer_norm", "layer_norm", settings=_SETTINGS)
def layer_norm(self: Any, x: Any = None, *others: Any, **named: Any) -> Any:
    if not _covers(self, x, others, named):
        return None
    return ir.ops.layer_norm(x, self.weight, getattr(self, "bias", None), epsilon_of(self))


def candidates(module: nn.Module) -> tuple[list[Replacement], int]:
    """Return the forms to try, and the width of the last dimension; none for other modules."""
    parameters = dict(module.named_parameters())
    if list(module.children()) or epsilon_of(module) is None:
        return [], 0
    if not parameters and "Norm" in type(module).__name__:
        width = getattr(module, "normalized_shape", None) or getattr(module, "dim", None)
        width = width[-1] if isinstance(width, tuple) and width else width
        return [unweighted], width if isinstance(width, int) else 64
    weight = parameters.pop("weight", None)
    if weight is None or weight.ndim != 1:
        return [], 0
    bias = parameters.pop("bias", None)
    if parameters or (bias is not None and bias.shape != weight.shape):
        return [], 0
    if bias is not None or isinstance(module, nn.LayerNorm):
        return [layer_norm], len(weight)
    return [ROUNDED_FIRST, ROUNDED_LAST, OFF_BY_ONE, layer_norm], len(weight)
