"""Launch Triton kernels with little work on the host.

``kernel[grid](...)`` costs the host tens of microseconds per call: Triton binds the arguments by
name, and formats all options as text to find the compiled kernel. :func:`launch` does this once for
each key of :func:`key_of`, and then calls the launcher of the compiled kernel.

The first call with a key decides about ``TRITON_DEBUG``. While a profiler has registered launch
hooks, calls go through Triton, which runs them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opweave.kernels.triton.registration import INTERPRETED

Key = tuple[object, ...]

_log = logging.getLogger(__name__)
_interpreter = threading.Lock()  # the interpreter patches triton.language, so it is not thread-safe
_current_device: Callable[[], int] = torch.cuda.current_device
_HAS_RANGES = torch.version.hip is not None
_MOST_IN_RANGE = 2**31 - 1  # bytes of storage that 32-bit offsets reach

# How Triton launches a compiled kernel, from 3.6 to 3.9.
_LAUNCH = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, "
    "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, "
    "*bound_args.values())"
)


class Bound(NamedTuple):
    """A compiled kernel, and what its launcher takes.

    Attributes:
        kernel: the compiled kernel, because Triton unloads it with the last reference.
        run: the launcher.
        function: the handle of the kernel on the device.
        metadata: numbers of warps and blocks, and shared memory, as the launcher takes them.
        constants: values of the last parameters of the kernel.
        stream_of: returns the handle of the current stream of a device.
        hooks: has the launch hooks of profilers.
    """

    kernel: Any
    run: Callable[..., None]
    function: object
    metadata: object
    constants: tuple[object, ...]
    stream_of: Callable[[int], int]
    hooks: Any


class Kernel:
    """A function in Triton's language, and its compiled kernels by key."""

    __slots__ = ("bound", "function")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.bound: dict[Key, Bound] = {}


class Kernels:
    """The kernels of a ``jit`` module, which is imported on first access."""

    def __init__(self, module: str) -> None:
        self._module = f"{__package__}.jit.{module}"

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):  # inspection must not import Triton
            raise AttributeError(name)
        kernel = Kernel(getattr(importlib.import_module(self._module), name))
        setattr(self, name, kernel)
        return kernel


def launch(
    kernel: Kernel, grid: tuple[int, ...], out: Tensor, *arguments: object, **constants: object
) -> None:
    """Launch *kernel* on *grid*, on the device of *out*, its first argument.

    Args:
        arguments: the next arguments of the kernel: tensors, numbers or None.
        constants: its compile-time constants, and options of the compiler.
    """
    if 0 in grid:
        return
    if INTERPRETED:
        with _interpreter:
            kernel.function[grid](out, *arguments, **constants)
        return
    device = out.get_device()
    if device == _current_device():
        _launch(kernel, grid, device, (out, *arguments), constants)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, device, (out, *arguments), constants)


def _launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    device: int,
    arguments: Sequence[Any],
    constants: Mapping[str, object],
) -> None:
    key = key_of(device, arguments, constants)
    bound = kernel.bound.get(key)
    if bound is None or _is_hooked(bound.hooks):
        compiled = kernel.function[grid](*arguments, **constants)
        if bound is None and _can_bind(kernel.function, compiled):
            kernel.bound[key] = _bind(kernel.function, compiled, len(arguments), constants)
        return
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    bound.run(
        x,
        y,
        z,
        bound.stream_of(device),
        bound.function,
        bound.metadata,
        None,
        None,
        None,
        *arguments,
        *bound.constants,
    )


def key_of(device: int, arguments: Sequence[Any], constants: Mapping[str, object]) -> Key:
    """Return a key that differs wherever Triton compiles another kernel for the arguments.

    Triton compiles for the types of arguments, for integers that are 1 or multiples of 16, for
    tensors that begin at a multiple of 16 bytes and, on AMD GPUs, for tensors in small storages.
    Keys also tell apart integers that a kernel does not specialize, which costs another entry.
    """
    key: list[object] = [device]
    add = key.append
    for value in arguments:
        kind = type(value)
        if kind is int:
            if value == 1:
                add(1)
            elif -0x80000000 <= value <= 0x7FFFFFFF:
                add(16 if value & 15 == 0 else 0)
            else:  # 64 bits, signed or not
                add((32 if value < 1 << 63 else 64) + (value & 15 == 0))
        elif value is None or kind is float or kind is bool:
            add(kind)
        else:
            add(value.dtype)
            add(value.data_ptr() & 15 == 0)
            if _HAS_RANGES:
                add(value.untyped_storage().nbytes() <= _MOST_IN_RANGE)
    return (*key, *constants, *constants.values())


def _is_hooked(hooks: Any) -> bool:
    """Return whether a profiler has registered a hook: a function, or a chain of several."""
    begin, end = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(begin, "calls", begin) or getattr(end, "calls", end))


def _bind(function: Any, compiled: Any, positional: int, constants: Mapping[str, object]) -> Bound:
    triton: Any = importlib.import_module("triton")
    values = tuple(constants[name] for name in function.arg_names[positional:])
    stream_of = triton.runtime.driver.active.get_current_stream
    hooks = triton.knobs.runtime
    return Bound(
        compiled,
        compiled.run,
        compiled.function,
        compiled.packed_metadata,
        values,
        stream_of,
        hooks,
    )


def _can_bind(function: Any, compiled: Any) -> bool:
    """Return whether *compiled*, the result of a launch by Triton, can be launched directly.

    None, or a kernel that is still being compiled, cannot yet.
    """
    triton: Any = importlib.import_module("triton")
    return isinstance(compiled, triton.compiler.CompiledKernel) and _is_known(function.__class__)


@cache
def _is_known(kind: type) -> bool:
    """Return whether Triton's functions of this class launch kernels as here; if not, log it."""
    triton: Any = importlib.import_module("triton")
    try:
        source = inspect.getsource(kind.run)  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError):
        source = ""
    if _LAUNCH in " ".join(source.split()):
        return True
    _log.warning(
        "Triton %s: %s.run does not launch kernels as in Triton 3.6 to 3.9, so all launches go "
        "through it, which costs the host tens of microseconds each. Results are not affected.",
        triton.__version__,
        kind.__name__,
    )
    return False
