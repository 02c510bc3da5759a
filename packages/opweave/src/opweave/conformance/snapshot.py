"""The memory and the global state of a process: copies, snapshots, heap checks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from opweave import torch_compat
from opweave.ir.op import tensors_in

# The storages of arguments: copies that keep strides and aliases, fake tensors, and snapshots.


Values = tuple[Any, ...]


def copied(values: Sequence[Any]) -> Values:
    """Copy the arguments with their whole storages: strides, offsets, margins, shared memory."""
    storages: dict[int, UntypedStorage] = {}
    return tuple(_copied(value, storages) for value in values)


def _copied(value: Any, storages: dict[int, UntypedStorage]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item, storages) for item in value)
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    copy = storages.setdefault(storage.data_ptr(), _cloned(storage))
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(copy, value.storage_offset(), value.shape, value.stride())


def _cloned(storage: Any) -> UntypedStorage:  # torch declares no types for clone
    copy: UntypedStorage = storage.clone()
    return copy


def fake_values(values: Values) -> tuple[AbstractContextManager[Any], Values]:
    """Return the arguments as fake tensors (strides and dtypes, no numbers), and their mode."""
    mode = torch_compat.fake_tensor_mode()
    with mode:
        return mode, _fake(values)


def _fake(value: Any) -> Any:
    """Return what ``mode.from_tensor`` makes of plain tensors, several times faster."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_fake, value))
    if not isinstance(value, Tensor):
        return value
    rest: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    if not value.storage_offset():
        return torch.empty_strided(value.shape, value.stride(), **rest)
    count = value.untyped_storage().nbytes() // value.element_size()
    return torch.empty(count, **rest).as_strided(
        value.shape, value.stride(), value.storage_offset()
    )


def raw(storage: UntypedStorage) -> Tensor:
    """Return the bytes of *storage*."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits in the same shape: NaN is itself, 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same memory, from the first to the last element of each."""
    (start, end), (other_start, other_end) = _span(a), _span(b)
    return a.device == b.device and start < other_end and other_start < end


def _span(t: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of *t* and of that behind its last."""
    steps = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + ((steps + 1) * t.element_size() if t.numel() else 0)


class Snapshot:
    """A snapshot of the storages of arguments."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.tensors = tensors_in(values)
        self._before = [raw(t.untyped_storage()).clone() for t in self.tensors]

    def changed(self, *, except_in: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the tensors whose storages have changed.

        The elements of *except_in* are ignored, but not the gaps between them.
        """
        changed = []
        for tensor, before in zip(self.tensors, self._before, strict=True):
            now = tensor.untyped_storage()
            after = _cloned(now)
            for free in except_in:
                if free.untyped_storage().data_ptr() == now.data_ptr():
                    _restore(after, before.untyped_storage(), free)
            if not torch.equal(raw(after), before):
                changed.append(tensor)
        return changed


def _restore(storage: UntypedStorage, before: UntypedStorage, where: Tensor) -> None:
    """Put what was in the elements of *where* back into *storage*."""
    after, old = (
        torch.empty(0, dtype=where.dtype, device=where.device).set_(s) for s in (storage, before)
    )
    places = torch.arange(after.numel(), device=where.device)
    used = places.as_strided(where.shape, where.stride(), where.storage_offset()).reshape(-1)
    after[used] = old[used]


# glibc's heap checks: a write past the memory of a result ends the process.
#
# Since glibc 2.34, they are in a separate library that must be loaded first; see ``mallopt(3)``,
# ``M_CHECK_ACTION``.


_LIBRARY = "libc_malloc_debug.so.0"
_PRELOAD, _TUNABLES = "LD_PRELOAD", "GLIBC_TUNABLES"


def checking_environment() -> dict[str, str]:
    """Return the environment variables that enable the checks in a new process.

    Empty if the library is missing, or if an allocator or a sanitizer is already preloaded.
    """
    if os.environ.get(_PRELOAD) or os.environ.get(_TUNABLES):
        return {}
    library = _library()
    return {} if library is None else {_PRELOAD: library, _TUNABLES: "glibc.malloc.check=3"}


def leave_to_this_process() -> None:
    """Disable the checks for processes that this one starts, such as compilers."""
    if os.environ.get(_PRELOAD, "").endswith(_LIBRARY):
        del os.environ[_PRELOAD], os.environ[_TUNABLES]


def _library() -> str | None:
    """Return the path of the library, which is in the folder of the C library."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    files = (Path(line.split(maxsplit=5)[-1]) for line in mapped.splitlines())
    path = next((file.with_name(_LIBRARY) for file in files if file.name == "libc.so.6"), None)
    return str(path) if path and path.exists() else None


# Global state of a process: torch settings, random numbers, the environment, the directory.


_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}  # when it first compiles


class _Part(NamedTuple):
    """How to read one part of the state, and to put it back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_TORCH}


def _write_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys() - _SET_BY_TORCH:
        del os.environ[name]
    os.environ.update(variables)


def _flushes_denormals() -> bool:
    """Whether the smallest numbers are zero to this thread."""
    return not torch.full((), 5e-324, dtype=torch.float64).mul(1.0).item()


_PARTS: Mapping[str, _Part] = {
    "torch.get_num_threads()": _Part(torch.get_num_threads, torch.set_num_threads),
    "torch.get_default_dtype()": _Part(torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": _Part(torch.get_default_device, torch.set_default_device),
    "torch.get_float32_matmul_precision()": _Part(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch.is_grad_enabled()": _Part(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.are_deterministic_algorithms_enabled()": _Part(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.is_autocast_enabled()": _Part(
        torch.is_autocast_enabled, lambda on: torch.set_autocast_enabled("cuda", on)
    ),
    "whether denormal numbers are zero": _Part(_flushes_denormals, torch.set_flush_denormal),
    "the state of torch's random numbers": _Part(
        lambda: bytes(torch.get_rng_state().numpy()),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    "the state of Python's random numbers": _Part(random.getstate, random.setstate),
    "os.environ": _Part(_environment, _write_environment),
    "the working directory": _Part(os.getcwd, os.chdir),
}


class GlobalState:
    """The state at one moment."""

    def __init__(self) -> None:
        self._values = {name: part.read() for name, part in _PARTS.items()}

    def restore(self) -> list[str]:
        """Put back what is different now, and return its names."""
        changed = [name for name, part in _PARTS.items() if part.read() != self._values[name]]
        for name in changed:
            _PARTS[name].write(self._values[name])
        return changed
