"""Launch Triton kernels with little work on the host: argument rules, outputs, registration."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opweave.ir import IrOp, rules
from opweave.ir.rules import BATCH_INVARIANT, Predicate, Rule, TensorRule
from opweave.kernels.arguments import FLOATS, one_element
from opweave.kernels.wrap import opaque
from opweave.packages import is_installed

# Register implementations in Triton.


Function = Callable[..., Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on CPU tensors."""

NAMESPACE = "opweave_triton"
_IS_INSTALLED = is_installed("triton")


def block_of(size: int) -> int:
    """Return the smallest power of two that is at least *size*.

    >>> [block_of(size) for size in (1, 64, 65)]
    [1, 64, 128]
    """
    return 1 << max(size - 1, 0).bit_length()


def implements(
    op: IrOp,
    supports_args: Predicate,
    *,
    inplace: bool = False,
    traits: Iterable[str] = (BATCH_INVARIANT,),
) -> Callable[[Function], Function]:
    """Register the decorated function as the Triton implementation of *op*.

    The function becomes an opaque op, unless it is in-place. An in-place implementation must call
    its kernels through :func:`opweave.kernels.wrap.mutating`.
    """
    register = op.register_impl(
        "triton",
        supported=_IS_INSTALLED,
        unsupported_reason=None if _IS_INSTALLED else "Triton is not installed",
        supports_args=supports_args,
        inplace=inplace,
        traits=traits,
    )
    make_opaque = opaque(op, NAMESPACE)
    return register if inplace else lambda function: register(make_opaque(function))


# The GPU that kernels are launched on: its limits, and how many programs keep it busy.


MANY_BYTES = 128 * 1024
"""The shared memory that large tiles need, with two prefetched ones."""


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory per program, in bytes."""
    if INTERPRETED:
        return MANY_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # incompletely typed in torch
    usual = properties.shared_memory_per_block  # all there is on AMD GPUs
    return int(getattr(properties, "shared_memory_per_block_optin", usual))


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors or compute units."""
    if INTERPRETED:
        return 16  # so that kernels run with and without splits in tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_count(programs: int, per_processor: int, most: int, device: torch.device) -> int:
    """Return the number of splits of each program, a power of two.

    Args:
        programs: the number of programs without splits.
        per_processor: the programs per multiprocessor that hide the latency of memory.
        most: the largest useful number of splits.
        device: the GPU.
    """
    splits = per_processor * processors(device) // max(programs, 1)
    return 1 << max(min(splits, most), 1).bit_length() - 1


# Allocate outputs, which are contiguous like those of native.


def new_rows(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor ``(*x.shape[:-1], width)``, by default with the dtype of *x*."""
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of shape ``(..., d)`` for *x* of shape ``(..., 2 * d)``."""
    return new_rows(x, x.shape[-1] // 2, dtype)


def codes_and_scales(
    x: Tensor, width: int, dtype: torch.dtype, count: int = 1
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for ``(..., width)`` codes, and float32 ``(..., count)`` scales."""
    return new_rows(x, width, dtype), new_rows(x, count, torch.float32)


# Argument rules shared by several implementations.


MAX_WIDTH = 65536
"""The largest row, in elements, that one program holds in registers."""

LIBRARY_FLOATS = (torch.float32, torch.float16) if INTERPRETED else FLOATS
"""The dtypes that the kernels of other libraries support."""

on_device = rules.cpu if INTERPRETED else rules.cuda
"""Require that tensors are on a GPU, or on the CPU if Triton is interpreted."""


def spaced_rows(name: str, *dtypes: torch.dtype) -> Rule:
    """Require that *name* has one of *dtypes*, and is contiguous or a matrix of contiguous rows."""
    return (
        on_device(name)
        & rules.dtype(name, *dtypes)
        & rules.ndim(name, *range(1, 9))
        & (rules.contiguous(name) | (rules.ndim(name, 2) & rules.unit_stride(name)))
    )


def rows(name: str) -> Rule:
    """Require that *name* is a float tensor, contiguous or a matrix with contiguous rows.

    The rows must have at most :data:`MAX_WIDTH` elements.
    """
    narrow = TensorRule(
        (name,),
        "{t}.shape[-1] <= {0}",
        lambda n, t: f"{n}: rows of {t.shape[-1]} elements (supports up to {MAX_WIDTH})",
        (MAX_WIDTH,),
    )
    return spaced_rows(name, *FLOATS) & narrow


def library_rows(name: str) -> Rule:
    """Require rows that the kernels of another library can read: contiguous, and as :func:`rows`.

    In Triton's interpreter, without bfloat16: it would multiply the bits of these kernels' values.
    """
    contiguous = rows(name) & rules.contiguous(name)
    return contiguous & rules.dtype(name, *LIBRARY_FLOATS)


def has_float8(name: str) -> Rule:
    """Require that *name* is on a device for which Triton supports float8_e4m3fn."""
    return TensorRule(
        (name,),
        "{0}({t})",
        lambda n, t: f"{n}: on {t.device} (float8_e4m3fn needs NVIDIA compute capability 8.9)",
        (_has_float8,),
    )


def _has_float8(x: Tensor) -> bool:
    if INTERPRETED:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)


def one_float32(name: str) -> Rule:
    """Require that *name* is one float32 on the device, or None if it is optional."""
    return on_device(name) & rules.dtype(name, torch.float32) & one_element(name)


def row_count(x: Tensor) -> int:
    """Return the number of rows of *x*.

    >>> row_count(torch.empty(3, 5, 7)), row_count(torch.empty(0, 7)), row_count(torch.empty(7))
    (15, 0, 1)
    """
    return x.shape[:-1].numel()


def row_stride(x: Tensor) -> int:
    """Return the row stride of *x*, in elements."""
    return x.stride(-2) if x.ndim > 1 else 0


# Launch Triton kernels with little work on the host.
#
# ``kernel[grid](...)`` costs the host tens of microseconds per call: Triton binds the arguments
# by name, and formats all options as text to find the compiled kernel. :func:`launch` does this
# once for each key of :func:`key_of`, and then calls the launcher of the compiled kernel.
#
# The first call with a key decides about ``TRITON_DEBUG``. While a profiler has registered
# launch hooks, calls go through Triton, which runs them.


Key = tuple[object, ...]

_log = logging.getLogger(__name__)
_interpreter = threading.Lock()  # the interpreter patches triton.language, so it is not thread-safe
_current_device: Callable[[], int] = torch.cuda.current_device
_HAS_RANGES = torch.version.hip is not None
_MAX_STORAGE_BYTES = 2**31 - 1  # bytes of storage that 32-bit offsets reach

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
        x, y, z, bound.stream_of(device), bound.function, bound.metadata, None, None, None,
        *arguments, *bound.constants,
    )  # fmt: skip


def key_of(device: int, arguments: Sequence[Any], constants: Mapping[str, object]) -> Key:
    """Return a key that differs wherever Triton compiles another kernel for the arguments.

    Triton compiles for the types of arguments, for integers that are 1 or multiples of 16, for
    tensors that begin at a multiple of 16 bytes and, on AMD GPUs, for tensors in small storages.
    Keys also distinguish integers that a kernel does not specialize, which costs another entry.
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
                add(value.untyped_storage().nbytes() <= _MAX_STORAGE_BYTES)
    return (*key, *constants, *constants.values())


def _is_hooked(hooks: Any) -> bool:
    """Return whether a profiler has registered a hook: a function, or a chain of several."""
    begin, end = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(begin, "calls", begin) or getattr(end, "calls", end))


def _bind(function: Any, compiled: Any, positional: int, constants: Mapping[str, object]) -> Bound:
    triton: Any = importlib.import_module("triton")
    values = tuple(constants[name] for name in function.arg_names[positional:])
    stream_of = triton.runtime.driver.active.get_current_stream
    launcher = compiled.run, compiled.function, compiled.packed_metadata
    return Bound(compiled, *launcher, values, stream_of, triton.knobs.runtime)


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
