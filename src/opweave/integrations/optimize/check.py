"""Compare the results of a module before and after it is replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.integrations.optimize.replaced import Replacement

SCALES = (1.0, 30.0, 1e-2)  # activations of usual size, outliers, and where an epsilon counts
ROWS = (2, 3)


def difference(module: nn.Module, replacement: Replacement, width: int, like: Tensor) -> str:
    """Return how a replacement differs from the module's ``forward``; "" if it does not.

    Args:
        module: a module whose ``forward`` takes one tensor of activations.
        replacement: the replacement of its ``forward``.
        width: the size of the last dimension of the activations.
        like: a tensor with the dtype and device of the activations.
    """
    generator = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for scale in SCALES:
            x = torch.randn(*ROWS, width, generator=generator) * scale
            x = x.to(like.device, like.dtype)
            try:
                expected = module(x.clone())
            except Exception as error:
                return f"it does not run on a tensor (..., {width}): {_brief(error)}"
            found = replacement.forward(module, x)
            if problem := _compare(found, expected, replacement):
                return problem
    return ""


def _compare(found: Any, expected: Any, replacement: Replacement) -> str:
    if not isinstance(expected, Tensor):
        return f"it returns {type(expected).__name__}, not a tensor"
    if not isinstance(found, Tensor):
        return "its arguments are not covered"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"it returns {expected.dtype} {tuple(expected.shape)}, and the op {found.dtype}"
    bounds = [getattr(ir.ops, op).get_tolerance(expected.dtype) for op in replacement.ops]
    rtol = max(each.rtol for each in bounds)
    # Sums of different order differ relative to the largest results, not to each single one.
    atol = max(each.atol for each in bounds) * max(1.0, expected.abs().amax().item())
    if torch.allclose(found, expected, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    off = (found.double() - expected.double()).abs().max().item()
    return f"it differs from {', '.join(replacement.ops)} by up to {off:.2g}"


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
