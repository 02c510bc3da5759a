"""Warn if a required gradient prevents a kernel from running, which inference rarely intends."""

from __future__ import annotations

import warnings

from opweave.ir.errors import GradientFallbackWarning
from opweave.ir.impl import IrOpImpl
from opweave.ir.selection import Selection
from opweave.ir.traits import DIFFERENTIABLE

_warned = False


def warn_of_fallback(selection: Selection) -> None:
    """Warn once per process that a kernel was passed over because it is not differentiable."""
    global _warned
    if _warned or DIFFERENTIABLE not in selection.policy.required:
        return
    impls = selection.op.impls
    passed_over = [r.provider for r in selection.rejected if _has_no_gradient(impls[r.provider])]
    if not passed_over:
        return
    _warned = True
    warnings.warn(
        f"{selection.op.name} runs {selection.provider} instead of {passed_over[0]}, which is not "
        "differentiable, because an argument requires a gradient. For inference, call the model "
        "under torch.no_grad() or torch.inference_mode(). This is shown once, for the first op.",
        GradientFallbackWarning,
        stacklevel=3,
    )


def _has_no_gradient(impl: IrOpImpl) -> bool:
    return impl.supported and DIFFERENTIABLE not in impl.traits
