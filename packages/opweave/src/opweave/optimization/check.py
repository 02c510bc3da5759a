"""Compare the results of a module before and after it is replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opweave import ir
from opweave.errors import notes
from opweave.optimization.forward import Replacement

SCALES = (1.0, 30.0, 1e-2)  # activations of usual size, outliers, and where an epsilon counts
ROWS = (2, 3)
OTHER_ROWS = ((), (5,), (2, 1, 3), (2, 1, 1, 3), (0,))  # other ranks, and an empty batch
GRADIENT_TOLERANCE = 0.05  # relative to the largest gradient


def difference(module: nn.Module, replacement: Replacement, width: int, like: Tensor) -> str:
    """Return how a replacement differs from the module's ``forward``; "" if it does not.

    Modules that torch does not define are also compared in training mode, on non-finite values,
    with other settings, and by their gradients, and normalization layers with other weights: at
    initialization, all weights are often one or zero. Their results must depend on nothing but
    their parameters, children and settings.

    Args:
        module: a module in evaluation mode whose ``forward`` takes one tensor of activations.
        replacement: the replacement of its ``forward``.
        width: the size of the last dimension of the activations.
        like: a tensor with the dtype and device of the activations.
    """
    if type(module).__call__ is not nn.Module.__call__:
        return "its class overrides __call__"
    compare = partial(_difference, module, replacement, width, like)
    if type(module).forward.__module__.startswith("torch.nn."):
        return compare(_usual(width))
    problem = compare(_inputs(width))
    if not problem:
        with _training(module):
            problem = compare(_usual(width)) and "it differs in training mode"
    if not problem and not [*module.children()]:
        with _other_weights(module):
            problem = compare(_usual(width)) and "it differs with other weights"
    if not problem:
        problem = compare(_extremes(width)) and "it differs on infinite or NaN values"
    if not problem and not [*module.parameters()]:
        others = (torch.bfloat16, torch.float16)
        problems = (compare(_inputs(width), dtype=dtype) for dtype in others)
        problem = next(filter(None, problems), "")
    for name in replacement.settings:
        value = getattr(module, name, None)
        if not problem and isinstance(value, float):
            with _setting(module, name, value + 0.5):
                problem = compare(_usual(width)) and f"it differs with another {name}"
    return (
        problem
        or _gradient_difference(module, replacement, width, like)
        or _unknown_dependence(module, replacement, width, like)
    )


def _random(width: int) -> Callable[..., Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(width), device="cpu")


def _usual(width: int) -> Iterator[Tensor]:
    """Yield activations of several magnitudes."""
    random = _random(width)
    for scale in SCALES:
        yield random(*ROWS, width) * scale


def _inputs(width: int) -> Iterator[Tensor]:
    """Yield activations of several magnitudes, ranks, strides and widths."""
    yield from _usual(width)
    random = _random(width)
    for rows in OTHER_ROWS:
        yield random(*rows, width)
    yield random(width, *ROWS).permute(1, 2, 0)
    for other in (1, width + 1, 2 * width):
        yield random(*ROWS, other)


def _extremes(width: int) -> Iterator[Tensor]:
    """Yield activations with values that are not finite."""
    x = _random(width)(*ROWS, width)
    x[0, 0, 0], x[0, 1, 0], x[0, 2, 0] = float("inf"), -float("inf"), float("nan")
    yield x


def _difference(
    module: nn.Module,
    replacement: Replacement,
    width: int,
    like: Tensor,
    inputs: Iterator[Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> str:
    with torch.no_grad():
        for values in inputs:
            x = values.to(like.device, dtype or like.dtype)
            is_usual = x.shape == (*ROWS, width)
            expected: Any = None
            try:
                expected = module(x.clone())
            except Exception as error:
                if is_usual:
                    return f"it does not run on a tensor (..., {width}): {brief(error)}"
            try:
                result = replacement.forward(module, x)
                if result is None and not is_usual:
                    continue  # the module runs its own forward
                problem = "" if expected is None else _compare(result, expected, replacement)
            except Exception as error:  # a dtype or a tensor subclass without kernels
                if expected is None:
                    continue
                return f"it cannot be compared with the op: {brief(error)}"
            if expected is None and x.shape[-1] != width:
                return f"it does not run on a tensor {tuple(x.shape)}, the op does"
            if problem:
                return problem
    return ""


def _gradient_difference(
    module: nn.Module, replacement: Replacement, width: int, like: Tensor
) -> str:
    """Compare the gradients of the inputs and the parameters."""
    if any(parameter.is_inference() for parameter in module.parameters()):
        return ""  # autograd does not record inference tensors
    x = next(_usual(width)).to(like.device, like.dtype)
    native = {op: ["native"] for op in (*replacement.ops, "linear")}  # kernels have none
    factor = _random(width + 1)(*x.shape).to(like.device)
    with torch.enable_grad(), ir.priority(native):
        try:
            expected, gradients = (
                _gradients(function, module, x.clone().requires_grad_(), factor)
                for function in (module, partial(replacement.forward, module))
            )
        except Exception as error:
            return f"its gradients cannot be compared: {brief(error)}"
    for ours, theirs in zip(gradients, expected, strict=True):
        if (ours is None) != (theirs is None):
            return "its gradients differ"
        if ours is not None and theirs is not None:
            room = GRADIENT_TOLERANCE * theirs.abs().max()
            if not bool(((ours - theirs).abs() <= room).all()):
                return "its gradients differ"
    return ""


def _gradients(
    function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, factor: Tensor
) -> Sequence[Tensor | None]:
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
    y = function(x)
    if not y.requires_grad:
        return [None] * len(inputs)
    return torch.autograd.grad((y.float() * factor).sum(), inputs, allow_unused=True)


def _unknown_dependence(
    module: nn.Module, replacement: Replacement, width: int, like: Tensor
) -> str:
    """Return what the module's ``forward`` may depend on that the replacement does not read."""
    if [*module.buffers()]:
        return "it has buffers"
    cls, read = type(module), set[str]()

    def recorded(self: nn.Module, name: str) -> Any:
        read.add(name)
        return super(spy, self).__getattribute__(name)

    spy: Any = type(cls.__name__, (cls,), {"__getattribute__": recorded})
    with torch.no_grad(), _Dtypes() as computed:
        x = next(_usual(width)).to(like.device, like.dtype)
        module.__class__ = spy
        try:
            module(x)
        finally:
            module.__class__ = cls
    if torch.float64 in computed.dtypes - {like.dtype}:
        return "it computes in float64"
    covered = {*replacement.settings, *module._parameters, *module._modules, *dir(nn.Module())}
    unknown = sorted(n for n in read - covered if not inspect.isroutine(getattr(cls, n, None)))
    return f"its forward reads the attribute {unknown[0]!r}" if unknown else ""


class _Dtypes(TorchFunctionMode):
    """Records the dtypes of tensors that are computed; rounded outputs do not show them."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        return result


@contextmanager
def _setting(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set an attribute in the block."""
    before = getattr(module, name)
    try:
        setattr(module, name, value)
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Set training mode; restore buffers and torch's random state afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    modules = [*module.modules()]
    try:
        for part in modules:
            part.training = True
        with torch.random.fork_rng():
            yield
    finally:
        for part in modules:
            part.training = False
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


@contextmanager
def _other_weights(module: nn.Module) -> Iterator[None]:
    """Give *module* random weights of both signs."""
    saved = [(parameter, parameter.data) for parameter in module.parameters()]
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, values in saved:
            random = torch.randn(values.shape, generator=generator, device="cpu")
            parameter.data = (3 * random).to(values.device, values.dtype)
        yield
    finally:
        for parameter, values in saved:
            parameter.data = values


def _compare(result: Any, expected: Any, replacement: Replacement) -> str:
    if not isinstance(expected, Tensor):
        return f"it returns {type(expected).__name__}, not a tensor"
    if not isinstance(result, Tensor):
        return "its arguments are not covered"
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return f"it returns {expected.dtype} {tuple(expected.shape)}, and the op {result.dtype}"
    bounds = [getattr(ir.ops, op).get_tolerance(expected.dtype) for op in replacement.ops]
    rtol = max(tolerance.rtol for tolerance in bounds)
    # Sums of different order differ relative to the largest results, not to each single one.
    largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if expected.numel() else 0.0
    atol = max(tolerance.atol for tolerance in bounds) * max(1.0, largest)
    if torch.allclose(result, expected, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    off = (result.double() - expected.double()).abs().max().item()
    return f"it differs from {', '.join(replacement.ops)} by up to {off:.2g}"


def brief(error: Exception) -> str:
    """Return the first line of an error, shortened, and its notes, which name a kernel."""
    return (str(error).splitlines() or [type(error).__name__])[0][:100] + notes(error)
