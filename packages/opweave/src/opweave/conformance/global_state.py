"""Global state of a process: torch settings, random numbers, the environment, the directory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

_OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}


class _Part(NamedTuple):
    """How to read one part of the state, and to put it back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _environment() -> dict[str, str]:
    # torch sets the folder of its cache when it first compiles.
    return {name: value for name, value in os.environ.items() if name not in _OF_TORCH}


def _write_environment(found: dict[str, str]) -> None:
    for name in os.environ.keys() - found.keys() - _OF_TORCH:
        del os.environ[name]
    os.environ.update(found)


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
        self._found = {name: part.read() for name, part in _PARTS.items()}

    def restore(self) -> list[str]:
        """Put back what is different now, and return its names."""
        changed = [name for name, part in _PARTS.items() if part.read() != self._found[name]]
        for name in changed:
            _PARTS[name].write(self._found[name])
        return changed
