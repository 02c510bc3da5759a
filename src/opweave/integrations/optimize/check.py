"""Compare the results of a module before and after it is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.integrations.optimize.replaced import Replacement

SCALES = (1.0, 30.0, 1e-2)  # activations of usual size, outliers, and where an epsilon counts
ROWS = (2, 3)


def difference(module: nn.Module, replacement: Replacement, width: int, like: Tensor) -> str:
    """Return how a replacement differs from the module's ``forward``; "" if it does not.

    Modules that torch does not define are also compared in training mode, and normalization layers
    with other weights: at initialization, all weights are often one or zero.

    Args:
        module: a module in evaluation mode whose ``forward`` takes one tensor of activations.
        replacement: the replacement of its ``forward``.
        width: the size of the last dimension of the activations.
        like: a tensor with the dtype and device of the activations.
    """
    compare = partial(_difference, module, replacement, width, like)
    if type(module).forward.__module__.startswith("torch.nn."):
        return compare()
    problem = compare()
    if not problem:
        with _training(module):
            problem = compare() and "it differs in training mode"
    if not problem and not [*module.children()]:
        with _other_weights(module):
            problem = compare() and "it differs with other weights"
    return problem


def _difference(module: nn.Module, replacement: Replacement, width: int, like: Tensor) -> str:
    generator = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for scale in SCALES:
            x = torch.randn(*ROWS, width, generator=generator, device="cpu") * scale
            x = x.to(like.device, like.dtype)
            try:
                expected = module(x.clone())
            except Exception as error:
                return f"it does not run on a tensor (..., {width}): {brief(error)}"
            try:
                problem = _compare(replacement.forward(module, x), expected, replacement)
            except Exception as error:  # a dtype or a tensor subclass without kernels
                return f"it cannot be compared with the op: {brief(error)}"
            if problem:
                return problem
    return ""


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Set training mode; restore buffers and torch's random state afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    modules = [*module.modules()]
    try:
        for each in modules:
            each.training = True
        with torch.random.fork_rng():
            yield
    finally:
        for each in modules:
            each.training = False
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


@contextmanager
def _other_weights(module: nn.Module) -> Iterator[None]:
    """Give *module* random weights around one."""
    kept = [(parameter, parameter.data) for parameter in module.parameters()]
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, values in kept:
            random = torch.randn(values.shape, generator=generator, device="cpu")
            parameter.data = (1 + 0.3 * random).to(values.device, values.dtype)
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values


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


def brief(error: Exception) -> str:
    """Return the first line of an error, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
